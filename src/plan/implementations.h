// SPDX-License-Identifier: Apache-2.0
// The ordered table of implementations. make_plan walks it from the top and takes the first row that supports the
// problem on the target and can meet the wishes; every refusal keeps its reason for Plan::explain().
#pragma once

#include <any>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/slot_rules.h"
#include "plan/backend.h"
#include "plan/kernel_source.h"
#include "problem/registered_callables.h"
#include "tessera/plan.h"

namespace tessera::detail {

struct Implementation;

/// Everything a plan decided. Filled by make_plan and by the implementation's plan(); read-only afterwards.
struct PlanState {
  Problem problem;
  Target target;  // threads resolved (never 0), isa resolved (never "")
  Wishes wishes;
  RegisteredCallables callables;  // the registered ones that the problem names
  SlotRules rules;                // what the problem's bindings must be
  const Backend* backend = nullptr;
  const Implementation* implementation = nullptr;
  std::string implementation_name;
  std::vector<Candidate> candidates;
  std::size_t workspace_bytes = 0;
  // Choices of implementations that walk tiles; 0 where they do not apply.
  std::int64_t tile_q = 0;    // query rows per tile, over all heads of a group
  std::int64_t tile_kv = 0;   // keys per tile
  std::int64_t splits = 1;    // parts of the KV sequence
  bool fixed_order = true;    // all sums have a fixed order, so that every run gives the same bits
  bool shared_group = false;  // one packed K/V tile serves all heads of a group
  std::string choice;         // the choices and their reasons, one line each, for explain()
  // The kernels that a run launches, if the device's code is compiled from text; `tessera compile` uses them, too.
  std::vector<KernelSource> kernels;
  std::any prepared;  // data of runs that do not depend on bindings; each implementation has its own type
};

/// A row of the table. Each backend derives its own type, which adds how a row is run (src/cpu/implementations.h,
/// src/cuda/implementations.h).
struct Implementation {
  const char* name;
  DeviceType device;
  std::optional<Operation> operation;  // the only one that it computes; nullopt: it decides in supports()
  // Called only if device, operation and pass match.
  Support (*supports)(const Problem& problem, const Target& target, const Wishes& wishes);
  void (*plan)(PlanState& state);  // fills the choices, workspace_bytes and kernels
  std::optional<Pass> pass{};      // the only one that it computes; nullopt: both
  bool by_name_only = false;       // chosen only if Wishes::implementation names it
};

/// The rows of all backends; each backend's are in the order of its implementations.h, best first. Defined in
/// src/api/implementations.cpp.
std::span<const Implementation* const> implementations() noexcept;

}  // namespace tessera::detail
