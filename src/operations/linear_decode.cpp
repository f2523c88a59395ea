// SPDX-License-Identifier: Apache-2.0
// linear_decode: a step of a few tokens with a pool of states. Tokens may wait in a ring beside the states.
#include <algorithm>

#include "bindings/validate_parts.h"
#include "operations/linear.h"
#include "operations/linear_steps.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

constexpr Word<Rounding> kRoundings[] = {{"nearest", Rounding::nearest}, {"stochastic", Rounding::stochastic}};

void parse(const LineReader& line, Problem& p) {
  read_linear_sizes(line, p);
  read_states(line, p, p.batch);
  p.linear.ring = line.integer("ring").value_or(0);
  p.linear.rounding = line.word("rounding", kRoundings).value_or(Rounding::nearest);
  p.scale = line.number("scale");
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  write_linear_sizes(line, p);
  write_states(line, p, p.batch);
  line.integer("ring", p.linear.ring, 0);
  if (p.linear.rounding != Rounding::nearest) line.word("rounding", word_of(kRoundings, p.linear.rounding));
  if (p.scale) line.number("scale", *p.scale);
  write_promises(line, p);
}

void check(const Problem& p) {
  refuse_unused(p, {{"pass", p.pass != Pass::forward}, {"q_layout", p.q_layout != Layout::dense}});
  const std::int64_t ring = p.linear.ring;
  if (p.seqlen_q > kMostStepTokens || (p.seqlen_q < 1 && !p.only_flushes())) {
    refuse_field("seqlen_q", std::to_string(p.seqlen_q), "1 to 8 tokens a step, or with a ring 0, which empties it");
  }
  if (ring != 0 && (ring < std::max<std::int64_t>(p.seqlen_q, 1) || ring > kLongestRing)) {
    refuse_field("linear.ring", std::to_string(ring), "0 for none, or seqlen_q to 64 tokens");
  }
  if (p.linear.rounding == Rounding::stochastic && p.linear.state_type != DType::bf16) {
    refuse_field("linear.rounding", "stochastic for states in " + std::string(to_string(p.linear.state_type)),
                 "nearest, or state=bf16");
  }
  check_linear(p);
  check_bytes("linear.ring", {p.linear.states, p.heads_q, 2 * ring, std::max(p.head_dim_qk, p.head_dim_v)});
}

void tensors(RuleWriter& w, const Problem& p) {
  if (!p.only_flushes()) token_tensors(w, p);
  slope_tensor(w, p);
  state_tensors(w, p);
  if (p.linear.rounding == Rounding::stochastic) w.seeds();
  if (p.linear.ring == 0) return dest_tensor(w, p);
  // The ring has the tokens that are not in the states yet, in two halves that are used by turns.
  const std::int64_t tokens = 2 * p.linear.ring;
  w.require(Slot::ring_k, Access::update, p.k_type, {p.linear.states, p.heads_q, tokens, p.head_dim_qk});
  w.require(Slot::ring_v, Access::update, p.v_type, {p.linear.states, p.heads_q, tokens, p.head_dim_v});
  w.require(Slot::ring_cursor, Access::read, DType::int32, {p.batch});
}

/// Also checks the cursors of sequences that have a state.
void check_values(const Problem& p, const Bindings& bindings) {
  check_linear_values(p, bindings);
  if (p.linear.ring == 0) return;
  const std::int64_t most = 2 * p.linear.ring + 1;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t cursor = int32_at(bindings[Slot::ring_cursor], b);
    if (slot_at(bindings[Slot::state_slots], b, b) < 0 || (cursor >= 0 && cursor <= most)) continue;
    refuse_element(
        Slot::ring_cursor, b, cursor,
        "0 to " + std::to_string(most) + ", what ring_advance() gives for a ring of " + std::to_string(p.linear.ring));
  }
}

}  // namespace

const OperationRules kLinearDecode = {
    .operation = Operation::linear_decode,
    .name = "linear_decode",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_linear_field,
    .tensors = tensors,
    .check_bound = check_states_bound,
    .check_values = check_values,
};

}  // namespace tessera::detail
