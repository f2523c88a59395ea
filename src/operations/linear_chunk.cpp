// SPDX-License-Identifier: Apache-2.0
// linear_chunk: linear attention over whole sequences, forward and backward. With a pool, it reads and writes states.
#include "operations/linear.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

void parse(const LineReader& line, Problem& p) {
  read_pass(line, p);
  read_linear_sizes(line, p);
  if (line.flag("varlen")) p.q_layout = Layout::varlen;
  p.total_q = or_default(line, "tq", default_total_q(p));
  read_states(line, p, 0);
  p.scale = line.number("scale");
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  write_pass(line, p);
  write_linear_sizes(line, p);
  line.flag("varlen", p.q_layout == Layout::varlen);
  line.integer("tq", p.total_q, default_total_q(p));
  write_states(line, p, 0);
  if (p.scale) line.number("scale", *p.scale);
  write_promises(line, p);
}

void check(const Problem& p) {
  refuse_unused(p, {{"linear.ring", p.linear.ring != 0}, {"linear.rounding", p.linear.rounding != Rounding::nearest}});
  check_linear(p);
}

void tensors(RuleWriter& w, const Problem& p) {
  token_tensors(w, p);
  slope_tensor(w, p);
  if (p.linear.states == 0) return;
  state_tensors(w, p);
  if (p.pass == Pass::forward) return dest_tensor(w, p);
  state_gradient(w, p, Slot::dstate_final);
  state_gradient(w, p, Slot::dstate_initial).written = true;
}

}  // namespace

const OperationRules kLinearChunk = {
    .operation = Operation::linear_chunk,
    .name = "linear_chunk",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_linear_field,
    .tensors = tensors,
    .check_bound = check_states_bound,
    .check_values = check_linear_values,
};

}  // namespace tessera::detail
