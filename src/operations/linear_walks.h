// SPDX-License-Identifier: Apache-2.0
// linear_chunk is one kind of walk over a sequence, C tokens at a time, with a state S of (x, z):
//
//     out_i = out_scale · (a^(i+lag) · X_i S + Σ_{j≤i} a^(i−j) · y_scale · (X_i·Y_j) Z_j)        a = exp(−slope)
//     S     ← a^C · S + Σ_j a^(C−j−lag) · y_scale · Y_j ⊗ Z_j
//
// The forward is one with (X, Y, Z) = (q, k, v). With G_t = dL/dS_t, the gradients are three:
//
//     dQ_t = scale · S_t dO_t      (dO, v, k) on the transposed state, again from the first token on
//     dV_t = G_tᵀ k_t              (k, q, dO) from the last token to the first: G_t = scale·q_t ⊗ dO_t + a·G_{t+1}
//     dK_t = G_t v_t               (v, dO, q) likewise, on its transpose
//
// S is decayed before it takes a token in and G after (lag 1 and 0). No walk waits for another.
#pragma once

#include <span>

#include "operations/linear_steps.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

struct LinearWalk {
  Slot x, y, z, out;
  Slot first, last;  // states it begins with and leaves; Slot::count_: none
  bool backwards;    // from the last token to the first: lag 0, y scaled; else lag 1, out scaled
  bool transposed;   // x is the dim of v, z that of q and k
};

inline std::span<const LinearWalk> linear_walks(const Problem& problem) noexcept {
  static constexpr LinearWalk kForward[] = {
      {Slot::q, Slot::k, Slot::v, Slot::o, Slot::state, Slot::state, false, false}};
  static constexpr LinearWalk kBackward[] = {
      {Slot::dout, Slot::v, Slot::k, Slot::dq, Slot::state, Slot::count_, false, true},
      {Slot::k, Slot::q, Slot::dout, Slot::dv, Slot::dstate_final, Slot::dstate_initial, true, false},
      {Slot::v, Slot::dout, Slot::q, Slot::dk, Slot::dstate_final, Slot::count_, true, true}};
  return problem.pass == Pass::forward ? std::span(kForward) : std::span<const LinearWalk>(kBackward);
}

/// Whether the state's rows are of z, x contiguous; else of x.
inline bool rows_of_z(const Problem& problem, const LinearWalk& walk) noexcept {
  return (problem.linear.state_layout == StateLayout::vk) != walk.transposed;
}

/// Where sequence `batch` finds or leaves a state in the tensor `slot`: an index of its first dimension, negative for
/// none.
inline std::int64_t state_index(const Bindings& bindings, Slot slot, std::int64_t batch, bool last) noexcept {
  if (slot == Slot::count_ || !bindings[slot]) return -1;
  if (slot != Slot::state) return batch;
  const std::int64_t source = slot_at(bindings[Slot::state_slots], batch, batch);
  return last ? slot_at(bindings[Slot::dest_slots], batch, source) : source;
}

}  // namespace tessera::detail
