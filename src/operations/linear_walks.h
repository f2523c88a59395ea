// SPDX-License-Identifier: Apache-2.0
// Both passes of linear_chunk are walks over a sequence, C tokens at a time, with a state S of shape (x, z):
//
//     out_i = out_scale · (a^(i+lag) · X_i S + Σ_{j≤i} a^(i−j) · y_scale · (X_i·Y_j) Z_j)        a = exp(−slope)
//     S     ← a^C · S + Σ_j a^(C−j−lag) · y_scale · Y_j ⊗ Z_j
//
// The forward is one walk, with (X, Y, Z) = (q, k, v). The backward is three, with G_t = dL/dS_t:
//
//     dQ_t = scale · S_t dO_t      (dO, v, k) on the transposed state, again from the first token on
//     dV_t = G_tᵀ k_t              (k, q, dO) from the last token to the first: G_t = scale·q_t ⊗ dO_t + a·G_{t+1}
//     dK_t = G_t v_t               (v, dO, q) likewise, on its transpose
//
// S is decayed before a token is added to it, G after (lag 1 and 0). No walk depends on another.
#pragma once

#include <span>

#include "operations/linear_steps.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

struct LinearWalk {
  Slot x, y, z, out;
  Slot first, last;  // the states that it begins and ends with; Slot::count_: none
  bool backwards;    // from the last token to the first: lag 0, y scaled; else lag 1, out scaled
  bool transposed;   // x is the dimension of v, z that of q and k
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

/// Whether z numbers the rows of the state and x is contiguous; else the other way round.
inline bool rows_of_z(const Problem& problem, const LinearWalk& walk) noexcept {
  return (problem.linear.state_layout == StateLayout::vk) != walk.transposed;
}

/// The index, in the first dimension of the tensor `slot`, of the state that sequence `batch` begins with, or with
/// `last` ends with; negative for none.
inline std::int64_t state_index(const Bindings& bindings, Slot slot, std::int64_t batch, bool last) noexcept {
  if (slot == Slot::count_ || !bindings[slot]) return -1;
  if (slot != Slot::state) return batch;
  const std::int64_t source = slot_at(bindings[Slot::state_slots], batch, batch);
  return last ? slot_at(bindings[Slot::dest_slots], batch, source) : source;
}

}  // namespace tessera::detail
