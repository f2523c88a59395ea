// SPDX-License-Identifier: Apache-2.0
// Slots of states, slopes and cursors of linear attention.
#include <cmath>

#include "bindings/validate_parts.h"
#include "problem/linear_steps.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

[[noreturn]] void refuse(Slot slot, std::int64_t index, const std::string& got, std::string want) {
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)), "[" + std::to_string(index) + "] = " + got,
              std::move(want));
}

/// Of sequences that have a state.
void check_cursors(const Problem& problem, const Bindings& bindings) {
  const Tensor& slots = bindings[Slot::state_slots];
  const std::int64_t most = 2 * problem.ring + 1;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int32_t cursor = bindings[Slot::ring_cursor].as<const std::int32_t>()[b];
    if (slot_at(slots, b, b) < 0 || (cursor >= 0 && cursor <= most)) continue;
    refuse(
        Slot::ring_cursor, b, std::to_string(cursor),
        "0 to " + std::to_string(most) + ", what ring_advance() gives for a ring of " + std::to_string(problem.ring));
  }
}

}  // namespace

void check_states(const Problem& problem, const Bindings& bindings) {
  for (const Slot slot : {Slot::state_slots, Slot::dest_slots}) {
    const Tensor& slots = bindings[slot];
    for (std::int64_t b = 0; slots && b < problem.batch; ++b) {
      const std::int64_t state = slot_at(slots, b, b);
      if (state >= problem.slots) {
        refuse(slot, b, std::to_string(state), "a state below " + std::to_string(problem.slots) + ", or -1 for none");
      }
    }
  }
  if (problem.ring > 0) check_cursors(problem, bindings);
  const float* slopes = bindings[Slot::decay_slopes].as<const float>();
  for (std::int64_t head = 0; head < problem.heads_q; ++head) {
    if (!(slopes[head] >= 0.0F)) refuse(Slot::decay_slopes, head, std::to_string(slopes[head]), "0 or more");
  }
}

}  // namespace tessera::detail
