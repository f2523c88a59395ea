// SPDX-License-Identifier: Apache-2.0
// What linear_decode and linear_chunk share: sizes, states and slopes.
#pragma once

#include "bindings/rule_writer.h"
#include "problem/operation.h"
#include "problem/shared_keys.h"

namespace tessera::detail {

/// b t h d dv dtype; `t` is seqlen_q.
void read_linear_sizes(const LineReader& line, Problem& problem);
void write_linear_sizes(LineWriter& line, const Problem& problem);
/// state layout slots
void read_states(const LineReader& line, Problem& problem, std::int64_t default_states);
void write_states(LineWriter& line, const Problem& problem, std::int64_t default_states);

void check_linear(const Problem& problem);
std::string_view own_linear_field(const Problem& problem);

/// q, k, v and o, or their gradients.
void token_tensors(RuleWriter& rules, const Problem& problem);
void slope_tensor(RuleWriter& rules, const Problem& problem);
/// The pool of states, and the slot of each sequence in it.
void state_tensors(RuleWriter& rules, const Problem& problem);
/// Where a step or a forward writes its states. If it is unbound, they replace those that were read.
void dest_tensor(RuleWriter& rules, const Problem& problem);
/// A gradient of the states: fp32, one state for each sequence and head.
SlotRule& state_gradient(RuleWriter& rules, const Problem& problem, Slot slot);

void check_states_bound(const Problem& problem, const Bindings& bindings);
/// Checks lengths, indices of states, and slopes.
void check_linear_values(const Problem& problem, const Bindings& bindings);

}  // namespace tessera::detail
