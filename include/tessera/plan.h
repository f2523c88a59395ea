// SPDX-License-Identifier: Apache-2.0
// A plan says how a problem is computed. It is a pure function of problem, target and wishes; making it touches no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"
#include "tessera/problem.h"

namespace tessera {

/// Where a plan will run. Target::cpu() is this machine's CPU; CUDA targets hold the properties of the chip on which a
/// plan depends.
struct Target {
  DeviceType device = DeviceType::cpu;
  int threads = 0;                 // cpu: worker threads, 0 = what OpenMP would use
  std::string isa;                 // cpu: "" for the best this machine has, else one of cpu_isas()
  int sm = 0;                      // cuda: compute capability, 90 for SM90
  std::int64_t shared_memory = 0;  // cuda: opt-in shared memory per block, in bytes
  int multiprocessors = 0;
  int index = 0;          // cuda: index of the driver's device
  bool emulated = false;  // cuda: a plan for another chip than the one that runs it, see emulate()

  static Target cpu(int threads = 0, std::string isa = {});
  /// A chip of this compute capability, present or not.
  static Target cuda(int sm);
  /// GPU `index` of this machine; −1: the one whose context is current on this thread, or GPU 0 if there is none.
  /// Throws Error{unsupported} without a driver, Error{invalid_argument} for an index that no GPU has.
  static Target cuda_device(int index = -1);
  /// A target for running plans of a chip of compute capability `sm` on GPU `index`. It has that chip's shared memory
  /// and this GPU's multiprocessors. A forward then runs only as many blocks on each multiprocessor as that shared
  /// memory holds. Throws as cuda_device does, and Error{unsupported} if this GPU has less shared memory, if `sm` is 90
  /// and this GPU is not 9.0, or if `sm` is above 90 and this GPU is older than 9.0.
  static Target emulate(int sm, int index = -1);
  bool operator==(const Target&) const = default;
  [[nodiscard]] std::string to_string() const;
};

/// Instruction sets that this build has and this machine can run, best first ("avx3", "avx2", "sse4", …).
std::vector<std::string> cpu_isas();

/// The caller's choices, which replace the default ones. make_plan refuses a wish that it cannot meet, with the reason.
struct Wishes {
  std::string implementation;           // "cpu.tiled", "cpu.reference"
  std::optional<std::int64_t> tile_q;   // query rows per tile, over all heads of a group
  std::optional<std::int64_t> tile_kv;  // keys per tile
  std::optional<std::int64_t> splits;   // parts of the keys (backward: of the rows), computed apart and combined
  std::optional<std::int64_t> stages;   // cuda: tiles of keys and values in flight (pipeline stages)
  std::optional<std::int64_t> warps;    // cuda: warps per block
  std::string loader;                   // cuda: "cp_async", "tma"
  /// From "tile_q=64 tile_kv=128 splits=2 implementation=cpu.tiled". Throws Error{parse}.
  static Wishes parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;
  bool operator==(const Wishes&) const = default;
};

/// Whether one row of the table of implementations supports the problem.
struct Candidate {
  std::string name;
  Support support;  // with the reason if it does not
};

namespace detail {
struct PlanState;  // src/plan/implementations.h
}

/// Immutable, cheap to copy, shareable between threads.
class Plan {
 public:
  explicit Plan(std::shared_ptr<const detail::PlanState> state) : state_(std::move(state)) {}
  [[nodiscard]] const Problem& problem() const noexcept;
  [[nodiscard]] const Target& target() const noexcept;
  [[nodiscard]] const std::string& implementation() const noexcept;
  [[nodiscard]] std::size_t workspace_bytes() const noexcept;
  /// Several lines: the problem, the target with its threads, the chosen implementation with its tiles, splits and
  /// workspace, and the reason of each refusal.
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const std::vector<Candidate>& candidates() const noexcept;
  [[nodiscard]] const detail::PlanState& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<const detail::PlanState> state_;
};

/// Chooses the first implementation in the table that supports the problem on the target and can meet the wishes.
/// Throws Error{unsupported} with the reasons of all implementations for this device, operation and pass (of the one
/// that the wishes name, if they name one), Error{invalid_argument} for wishes out of range, and what Problem::check
/// throws.
Plan make_plan(const Problem& problem, const Target& target = Target::cpu(), const Wishes& wishes = {});

/// Whether make_plan would find an implementation; the reason if not. Throws only what Problem::check throws.
Support supports(const Problem& problem, const Target& target = Target::cpu(), const Wishes& wishes = {});

}  // namespace tessera
