// SPDX-License-Identifier: Apache-2.0
// What plans and executors ask of a kind of device. Each backend implements it once: src/cpu/backend.cpp,
// src/cuda/backend.cpp. Backends know plans; plans know no backend but through this.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tessera/executor.h"
#include "tessera/plan.h"

namespace tessera::detail {

struct PlanState;

/// What an executor keeps between its runs, for example loaded kernels: of a type of the backend's own.
struct DeviceState {
  DeviceState() = default;
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;
  virtual ~DeviceState() = default;
};

class Backend {
 public:
  /// In errors: "runs on CUDA, the target is …".
  [[nodiscard]] virtual const char* name() const noexcept = 0;

  /// A device of this machine, −1 for the caller's current one. Throws Error{unsupported} when there is none,
  /// Error{invalid_argument} for an index that there is not.
  [[nodiscard]] virtual Target device(int index) const = 0;
  /// Instruction sets that a target can name, best first; none where a device has but one.
  [[nodiscard]] virtual std::vector<std::string> isas() const = 0;
  /// `target` with every choice made that it leaves open. Throws Error for a choice that this build or machine lacks.
  [[nodiscard]] virtual Target resolve(const Target& target) const = 0;

  /// What holds for all rows of the table: a refusal here spares asking each.
  [[nodiscard]] virtual Support supports(const Wishes& wishes) const = 0;
  /// Lets the chosen row of the table plan, and adds what every plan of the device has.
  virtual void plan(PlanState& state) const = 0;

  /// For a new executor. Throws Error{unsupported} when the target is not there: a plan may be for another chip.
  /// nullptr when nothing is kept.
  [[nodiscard]] virtual std::unique_ptr<DeviceState> open(const PlanState& state) const = 0;
  /// Memory of the target's device, at least 64-byte aligned. Throws std::bad_alloc.
  [[nodiscard]] virtual void* allocate(const Target& target, std::size_t bytes) const = 0;
  /// What allocate() gave. Waits for what still uses it.
  virtual void release(const Target& target, void* memory) const noexcept = 0;

  /// Does ahead of the first run what may take long, such as compiling kernels.
  virtual void prepare(const PlanState& state, DeviceState* kept) const = 0;
  /// Runs the plan's row on bindings that have passed validation, and what metadata=report reports on a device. Neither
  /// allocates nor synchronises once prepared. `kept` is what open() gave; `workspace` has workspace_bytes.
  virtual void run(const PlanState& state, DeviceState* kept, const Bindings& bindings, std::byte* workspace,
                   Stream stream) const = 0;

 protected:
  constexpr Backend() = default;
  ~Backend() = default;  // backends are constants, never deleted through this
};

/// The backend of a kind of device; the table is in src/api/implementations.cpp.
const Backend& backend(DeviceType device) noexcept;

}  // namespace tessera::detail
