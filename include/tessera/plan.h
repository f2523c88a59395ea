// SPDX-License-Identifier: Apache-2.0
// How a problem will be computed: a pure function of problem, target and wishes. No GPU is touched.
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

/// Where a plan will run. Target::cpu() is this machine's CPU; CUDA targets carry what a plan needs to know of the
/// chip.
struct Target {
  DeviceType device = DeviceType::cpu;
  int threads = 0;                 // cpu: worker threads, 0 = what OpenMP would use
  std::string isa;                 // cpu: "" for the best this machine has, else one of cpu_isas()
  int sm = 0;                      // cuda: compute capability, 90 for SM90
  std::int64_t shared_memory = 0;  // cuda: opt-in bytes a block
  int multiprocessors = 0;
  int index = 0;          // cuda: which of the driver's devices
  bool emulated = false;  // cuda: another chip's budget on this one

  static Target cpu(int threads = 0, std::string isa = {});
  /// A chip of this compute capability, present or not.
  static Target cuda(int sm);
  /// The GPU `index` of this machine; −1 for the one whose context is current on this thread, or 0. Throws
  /// Error{unsupported} without a driver, Error{invalid_argument} for an index that there is not.
  static Target cuda_device(int index = -1);
  /// The plan of a chip of capability `sm` on the GPU that is there: its shared memory, the present multiprocessors.
  /// A forward then runs as many blocks on each of these as that shared memory has room for.
  /// Throws as cuda_device does, and Error{unsupported} when the present chip is older or has less shared memory.
  static Target emulate(int sm, int index = -1);
  bool operator==(const Target&) const = default;
  [[nodiscard]] std::string to_string() const;
};

/// Instruction sets that this build has and this machine can run, best first ("avx3", "avx2", "sse4", …).
std::vector<std::string> cpu_isas();

/// What the caller would like instead of the default choice. A wish that cannot be met is refused with the reason.
struct Wishes {
  std::string implementation;           // "cpu.tiled", "cpu.reference"
  std::optional<std::int64_t> tile_q;   // query rows a tile (all heads of a group together)
  std::optional<std::int64_t> tile_kv;  // keys a tile
  std::optional<std::int64_t> splits;   // parts of the keys, in a backward of the rows, computed apart and combined
  std::optional<std::int64_t> stages;   // cuda: tiles of keys and values in flight
  std::optional<std::int64_t> warps;    // cuda: warps a block
  std::string loader;                   // cuda: "cp_async", "tma"
  /// From "tile_q=64 tile_kv=128 splits=2 implementation=cpu.tiled". Throws Error{parse}.
  static Wishes parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;
  bool operator==(const Wishes&) const = default;
};

/// The outcome for one row of the table of implementations.
struct Candidate {
  std::string name;
  Support support;  // reason when refused
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
  /// Several lines: the problem, the target, what was chosen with its tiles, splits, threads and workspace, and for
  /// every implementation refused, why.
  [[nodiscard]] std::string explain() const;
  [[nodiscard]] const std::vector<Candidate>& candidates() const noexcept;
  [[nodiscard]] const detail::PlanState& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<const detail::PlanState> state_;
};

/// Chooses the first implementation in the table that supports the problem on the target and can meet the wishes.
/// Throws Error{unsupported} listing every candidate's reason, or what Problem::check throws.
Plan make_plan(const Problem& problem, const Target& target = Target::cpu(), const Wishes& wishes = {});

/// Whether make_plan would succeed; the reason if not. Never throws for a well-formed problem.
Support supports(const Problem& problem, const Target& target = Target::cpu(), const Wishes& wishes = {});

}  // namespace tessera
