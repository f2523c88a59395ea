// SPDX-License-Identifier: Apache-2.0
// A case's buffers on a GPU: copied there with everything around the tensors, and back, so that the same code judges.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cases/inputs/inputs.h"
#include "tessera/executor.h"

namespace tessera::cases {

enum class Placement : std::uint8_t {
  together,  // one allocation; poison and guard bytes around every tensor are copied too
  apart,     // an allocation of exactly its bytes for each tensor and the workspace: what a memory checker can judge
};

/// Device memory of one trial. The tensors keep their strides; their first elements are aligned to 16 bytes.
class DeviceCopy {
 public:
  DeviceCopy(Inputs& inputs, std::size_t workspace_bytes, int device, Placement placement);
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  [[nodiscard]] const Bindings& bindings() const noexcept { return bindings_; }
  [[nodiscard]] void* workspace() const noexcept { return workspace_; }

  /// Host → device; the workspace and all slack are poisoned. Waits.
  void upload();
  /// Device → host, inputs too. Waits. "" or what was written outside the tensors' buffers.
  std::string download();

 private:
  struct Region {
    std::byte* host;  // nullptr: workspace
    std::size_t bytes;
    std::size_t at;  // together: offset in the arena
    void* device;
  };
  void place(std::byte* host, std::size_t bytes, std::size_t shift, int device);

  Placement placement_;
  int device_;
  Bindings bindings_;
  std::vector<Region> regions_;
  std::vector<void*> allocations_;
  std::vector<std::byte> arena_;  // together: the host's image of the one allocation
  void* workspace_ = nullptr;
};

/// A stream of this thread on the device, made once; it does not wait for the default stream.
Stream device_stream(int device);
/// Waits for the stream. Throws Error{internal} when a kernel failed.
void wait_for(Stream stream);
/// Whether the context still works: after a fault in a kernel it never does again.
bool device_works(int device) noexcept;

}  // namespace tessera::cases
