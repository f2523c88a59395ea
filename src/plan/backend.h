// SPDX-License-Identifier: Apache-2.0
// The interface of plans and executors to a kind of device. Each backend implements it once: src/cpu/backend.cpp,
// src/cuda/backend.cpp. Backends know plans; plans know backends only through this interface.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tessera/executor.h"
#include "tessera/plan.h"

namespace tessera::detail {

struct PlanState;

/// State that an executor keeps between its runs, for example loaded kernels. Each backend derives its own type.
struct DeviceState {
  DeviceState() = default;
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;
  virtual ~DeviceState() = default;
};

class Backend {
 public:
  /// The name in errors, as in "runs on CUDA, the target is …".
  [[nodiscard]] virtual const char* name() const noexcept = 0;

  /// Device `index` of this machine; −1: the caller's current one. Throws Error{unsupported} if there is none,
  /// Error{invalid_argument} for an index that no device has.
  [[nodiscard]] virtual Target device(int index) const = 0;
  /// Instruction sets that a target can name, best first; empty if the device has only one.
  [[nodiscard]] virtual std::vector<std::string> isas() const = 0;
  /// `target` with all open choices made. Throws Error for a choice that this build or machine does not have.
  [[nodiscard]] virtual Target resolve(const Target& target) const = 0;

  /// The rules that are common to all rows of the table; if this refuses, no row is asked.
  [[nodiscard]] virtual Support supports(const Wishes& wishes) const = 0;
  /// Calls plan() of the chosen row of the table, and adds what every plan for the device has.
  virtual void plan(PlanState& state) const = 0;

  /// The state of a new executor; nullptr if nothing is kept. Throws Error{unsupported} if this machine does not have
  /// the target: a plan may be for another chip.
  [[nodiscard]] virtual std::unique_ptr<DeviceState> open(const PlanState& state) const = 0;
  /// Memory of the target's device, at least 64-byte aligned. Throws std::bad_alloc.
  [[nodiscard]] virtual void* allocate(const Target& target, std::size_t bytes) const = 0;
  /// Frees what allocate() returned. Waits for work that still uses it.
  virtual void release(const Target& target, void* memory) const noexcept = 0;

  /// Does what may take long, such as compiling kernels, before the first run.
  virtual void prepare(const PlanState& state, DeviceState* kept) const = 0;
  /// Runs the plan's row on validated bindings, after the check of metadata on a device if the problem has
  /// metadata=report. Neither allocates nor synchronises once prepared. `kept` is what open() returned; `workspace` has
  /// workspace_bytes.
  virtual void run(const PlanState& state, DeviceState* kept, const Bindings& bindings, std::byte* workspace,
                   Stream stream) const = 0;

 protected:
  constexpr Backend() = default;
  ~Backend() = default;  // backends are constants, never deleted through this type
};

/// The backend of a kind of device; the table is in src/api/implementations.cpp.
const Backend& backend(DeviceType device) noexcept;

}  // namespace tessera::detail
