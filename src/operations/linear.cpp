// SPDX-License-Identifier: Apache-2.0
#include "operations/linear.h"

#include <algorithm>

#include "bindings/validate_parts.h"
#include "operations/linear_steps.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

constexpr Word<StateLayout> kStateLayouts[] = {{"vk", StateLayout::vk}, {"kv", StateLayout::kv}};

/// Rows and columns of a head's state.
struct StateShape {
  std::int64_t rows, columns;
};
StateShape state_shape(const Problem& p) noexcept {
  if (p.linear.state_layout == StateLayout::vk) return {p.head_dim_v, p.head_dim_qk};
  return {p.head_dim_qk, p.head_dim_v};
}

}  // namespace

void read_linear_sizes(const LineReader& line, Problem& p) {
  p.batch = line.integer("b").value_or(1);
  p.seqlen_q = line.integer("t").value_or(1);
  p.heads_q = p.heads_kv = line.integer("h").value_or(1);
  p.head_dim_qk = line.integer("d").value_or(64);
  p.head_dim_v = line.integer("dv").value_or(p.head_dim_qk);
  read_types(line, p);
}

void write_linear_sizes(LineWriter& line, const Problem& p) {
  line.integer("b", p.batch, 1);
  line.integer("t", p.seqlen_q, 1);
  line.integer("h", p.heads_q, 1);
  line.integer("d", p.head_dim_qk, 64);
  line.integer("dv", p.head_dim_v, p.head_dim_qk);
  write_types(line, p);
}

void read_states(const LineReader& line, Problem& p, std::int64_t default_states) {
  if (const auto text = line.value("state")) p.linear.state_type = parse_dtype(*text, "state");
  p.linear.state_layout = line.word("layout", kStateLayouts).value_or(StateLayout::vk);
  p.linear.states = line.integer("slots").value_or(default_states);
}

void write_states(LineWriter& line, const Problem& p, std::int64_t default_states) {
  const LinearStates& s = p.linear;
  if (s.state_type != DType::fp32) line.word("state", to_string(s.state_type));
  if (s.state_layout != StateLayout::vk) line.word("layout", word_of(kStateLayouts, s.state_layout));
  line.integer("slots", s.states, default_states);
}

void check_linear(const Problem& p) {
  if (p.heads_kv != p.heads_q) {
    refuse_field("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " query heads",
                 "as many as heads_q, each head has a state");
  }
  check_head_dim("head_dim_qk", p.head_dim_qk);
  check_head_dim("head_dim_v", p.head_dim_v);
  check_size("linear.states", p.linear.states, 0);
  if (p.linear.state_type != DType::fp32 && p.linear.state_type != DType::bf16) {
    refuse_field("linear.state_type", std::string(to_string(p.linear.state_type)), "fp32 or bf16");
  }
  check_scale(p);
  refuse_unused(p, {{"seqused_q", p.seqused_q}, {"kv", p.kv != KvSource{}}, {"sink", p.sink}, {"lse", p.lse}});
  check_bytes("batch", {p.batch, p.heads_q, p.head_dim_qk, p.head_dim_v});
  check_bytes("linear.states", {p.linear.states, p.heads_q, p.head_dim_qk, p.head_dim_v});
}

std::string_view own_linear_field(const Problem& p) {
  const LinearStates& s = p.linear;
  if (s.states != 0) return "linear.states";
  if (s.state_type != DType::fp32) return "linear.state_type";
  if (s.state_layout != StateLayout::vk) return "linear.state_layout";
  if (s.ring != 0) return "linear.ring";
  return s.rounding != Rounding::nearest ? "linear.rounding" : "";
}

void token_tensors(RuleWriter& w, const Problem& p) {
  w.query_lengths();
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_rows(Slot::k, Access::read, p.k_type, p.heads_q, p.head_dim_qk);
  w.query_rows(Slot::v, Access::read, p.v_type, p.heads_q, p.head_dim_v);
  if (p.pass == Pass::forward) {
    w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  } else {
    w.query_rows(Slot::dout, Access::read, p.o_type, p.heads_q, p.head_dim_v);
    w.query_rows(Slot::dq, Access::write, p.q_type, p.heads_q, p.head_dim_qk);
    w.query_rows(Slot::dk, Access::write, p.k_type, p.heads_q, p.head_dim_qk);
    w.query_rows(Slot::dv, Access::write, p.v_type, p.heads_q, p.head_dim_v);
  }
}

void slope_tensor(RuleWriter& w, const Problem& p) {
  w.require(Slot::decay_slopes, Access::read, DType::fp32, {p.heads_q});
}

void state_tensors(RuleWriter& w, const Problem& p) {
  const StateShape shape = state_shape(p);
  w.require(Slot::state, p.pass == Pass::forward ? Access::update : Access::read, p.linear.state_type,
            {p.linear.states, p.heads_q, shape.rows, shape.columns});
  w.allow(Slot::state_slots, DType::int32, {p.batch}).or_int64 = true;
}

void dest_tensor(RuleWriter& w, const Problem& p) {
  w.allow(Slot::dest_slots, DType::int32, {p.batch}).or_int64 = true;
}

SlotRule& state_gradient(RuleWriter& w, const Problem& p, Slot slot) {
  const StateShape shape = state_shape(p);
  return w.allow(slot, DType::fp32, {p.batch, p.heads_q, shape.rows, shape.columns});
}

void check_states_bound(const Problem& p, const Bindings& bindings) {
  if (!bindings[Slot::state] || bindings[Slot::state_slots] || p.batch <= p.linear.states) return;
  throw Error(ErrorCode::invalid_argument, "state_slots", "unbound",
              "bound: " + std::to_string(p.batch) + " sequences share a pool of " + std::to_string(p.linear.states) +
                  " states");
}

void check_linear_values(const Problem& p, const Bindings& bindings) {
  for (const Slot slot : {Slot::state_slots, Slot::dest_slots}) {
    const Tensor& slots = bindings[slot];
    for (std::int64_t b = 0; slots && b < p.batch; ++b) {
      const std::int64_t state = slot_at(slots, b, b);
      if (state < p.linear.states) continue;
      refuse_element(slot, b, state, "a state below " + std::to_string(p.linear.states) + ", or -1 for none");
    }
  }
  const float* slopes = bindings[Slot::decay_slopes].as<const float>();
  for (std::int64_t head = 0; head < p.heads_q; ++head) {
    if (slopes[head] >= 0.0F) continue;
    throw Error(ErrorCode::out_of_range, "decay_slopes",
                "[" + std::to_string(head) + "] = " + std::to_string(slopes[head]), "0 or more");
  }
  check_query_lengths(p, bindings);
}

}  // namespace tessera::detail
