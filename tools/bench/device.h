// SPDX-License-Identifier: Apache-2.0
// A measurement on a GPU: inputs copied there, each call timed by events on a stream, behind a flush of the L2 cache.
#pragma once

#include <vector>

#include "bench/in_place.h"
#include "bench/inputs.h"
#include "bench/probe.h"
#include "cuda/driver/driver.h"
#include "tessera/executor.h"

namespace tessera::cli {

class DeviceRun {
 public:
  /// Copies the arrays to the executor's device. `as_graph`: calls are measured in a row, as one CUDA graph. Throws
  /// std::bad_alloc when they do not fit.
  DeviceRun(Executor& executor, const BenchInputs& inputs, bool as_graph);
  ~DeviceRun();
  DeviceRun(const DeviceRun&) = delete;
  DeviceRun& operator=(const DeviceRun&) = delete;

  /// Microseconds of one call, the median of `calls` after `warm_up` untimed ones. Before each, 256 MiB are written, so
  /// that no input is in the cache; the device is busy with that while the host queues the call, so that host time
  /// does not count.
  /// As a graph, and always of inputs with slots_by_call, the calls are measured in a row without a flush, each with
  /// its slots: the mean of one.
  double time(int calls, int warm_up);

  /// For inputs with slots_by_call, the microseconds of the best of some passes in place over as many bytes as a call's
  /// states have, in the same memory and measured alike: what a call can reach. 0 for other inputs.
  double time_in_place(int calls, int warm_up);

  /// What the last call wrote into a tensor.
  void fetch(Slot slot, const files::Array& to) const;

  static constexpr int kMostCalls = 100;
  static constexpr double kFlushMicroseconds = 100;  // about

 private:
  /// Calls in a row as a CUDA graph, recorded anew when their number is another.
  struct Recorded {
    cuda::GraphExecHandle graph = nullptr;
    int calls = 0;
  };
  void* copy_of(const files::Array& array);
  void release() noexcept;
  template <class Call>
  double time_graph(Recorded& recorded, int calls, int warm_up, const Call& call);

  Executor& executor_;
  bool as_graph_;
  int device_;
  Stream stream_;
  Bindings bindings_;
  std::vector<void*> memory_;
  void* flush_ = nullptr;
  std::vector<cuda::EventHandle> events_;
  std::vector<void*> slots_by_call_;  // state_slots of the calls
  std::vector<void*> cursors_;        // ring_cursor of them, if they have any
  Recorded steps_;
  std::vector<InPlacePass> passes_;
  std::vector<Recorded> recorded_passes_;
};

/// Multiply-adds of bf16 operands, by wgmma where the target has it, else by mma.sync, and copying memory that no cache
/// holds (bytes read and written). Measures for about a second, so that the clock is what power allows.
Roofline measure_device_roofline(const Target& target);

}  // namespace tessera::cli
