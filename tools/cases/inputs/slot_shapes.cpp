// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/slot_shapes.h"

#include <initializer_list>
#include <string>

namespace tessera::cli {
namespace {

using Shape = std::vector<std::int64_t>;

// (…rows, heads, dim)
Shape query_shape(const Problem& problem, std::int64_t heads, std::int64_t dim) {
  if (problem.q_layout == Layout::varlen) return {problem.total_q, heads, dim};
  return {problem.batch, problem.seqlen_q, heads, dim};
}

Shape lse_shape(const Problem& problem) {
  if (problem.q_layout == Layout::varlen) return {problem.heads_q, problem.total_q};
  return {problem.batch, problem.heads_q, problem.seqlen_q};
}

Shape key_shape(const Problem& problem, const KvSource& source, std::int64_t dim) {
  switch (source.layout) {
    case KvLayout::dense:
      return {problem.batch, source.seqlen, problem.heads_kv, dim};
    case KvLayout::varlen:
      return {source.total, problem.heads_kv, dim};
    case KvLayout::paged_table:
    case KvLayout::paged_csr:
      return {source.pages, source.page_size, problem.heads_kv, dim};
  }
  return {};
}

Shape with_parts(std::int64_t parts, const Shape& shape) {
  Shape all{parts};
  all.insert(all.end(), shape.begin(), shape.end());
  return all;
}

DType gradient_type(const Problem& problem, DType type) { return problem.grad_fp32 ? DType::fp32 : type; }

void add_backward_inputs(const Problem& problem, std::vector<SlotShape>& slots) {
  const Shape o = query_shape(problem, problem.heads_q, problem.head_dim_v);
  slots.push_back({Slot::o, problem.o_type, o});
  if (problem.residual) slots.push_back({Slot::o_residual, DType::int8, o});
  slots.push_back({Slot::lse, DType::fp32, lse_shape(problem)});
  slots.push_back({Slot::dout, problem.o_type, o});
  if (problem.dlse) slots.push_back({Slot::dlse, DType::fp32, lse_shape(problem)});
}

void add_gradients(const Problem& problem, std::vector<SlotShape>& slots) {
  const DType k_type = gradient_type(problem, problem.k_type);
  const DType v_type = gradient_type(problem, problem.v_type);
  slots.push_back(
      {Slot::dq, gradient_type(problem, problem.q_type), query_shape(problem, problem.heads_q, problem.head_dim_qk)});
  slots.push_back({Slot::dk, k_type, key_shape(problem, problem.kv, problem.head_dim_qk)});
  slots.push_back({Slot::dv, v_type, key_shape(problem, problem.kv, problem.head_dim_v)});
  if (problem.kv2) {
    slots.push_back({Slot::dk2, k_type, key_shape(problem, *problem.kv2, problem.head_dim_qk)});
    slots.push_back({Slot::dv2, v_type, key_shape(problem, *problem.kv2, problem.head_dim_v)});
  }
  if (problem.sink) slots.push_back({Slot::dsink, DType::fp32, {problem.heads_q}});
}

void add_tile_outputs(const Problem& problem, std::vector<SlotShape>& slots) {
  const std::int64_t key_blocks = problem.key_blocks();
  const Shape rows{problem.batch, problem.heads_q, problem.query_blocks()};
  const auto rows_of = [&](std::int64_t last) {
    Shape shape = rows;
    shape.push_back(last);
    return shape;
  };
  if (problem.next == TileList::Form::indices) {
    slots.push_back({Slot::next_counts, DType::int32, rows});
    slots.push_back({Slot::next_indices, DType::int32, rows_of(key_blocks)});
  } else if (problem.next == TileList::Form::bitmask) {
    slots.push_back({Slot::next_bits, DType::uint32, rows_of((key_blocks + 31) / 32)});
  }
  if (problem.mass != MassKind::none) slots.push_back({Slot::tile_mass, DType::fp32, rows_of(key_blocks)});
}

}  // namespace

std::vector<SlotShape> value_inputs(const Problem& problem) {
  std::vector<SlotShape> slots;
  const std::int64_t d = problem.head_dim_qk, dv = problem.head_dim_v;
  if (problem.is_linear()) {
    if (!problem.only_flushes()) {
      slots.push_back({Slot::q, problem.q_type, query_shape(problem, problem.heads_q, d)});
      slots.push_back({Slot::k, problem.k_type, query_shape(problem, problem.heads_q, d)});
      slots.push_back({Slot::v, problem.v_type, query_shape(problem, problem.heads_q, dv)});
    }
    if (problem.linear.ring > 0) {
      slots.push_back(
          {Slot::ring_k, problem.k_type, {problem.linear.states, problem.heads_q, 2 * problem.linear.ring, d}});
      slots.push_back(
          {Slot::ring_v, problem.v_type, {problem.linear.states, problem.heads_q, 2 * problem.linear.ring, dv}});
    }
    if (problem.pass == Pass::backward) {
      slots.push_back({Slot::dout, problem.o_type, query_shape(problem, problem.heads_q, dv)});
    }
    const bool vk = problem.linear.state_layout == StateLayout::vk;
    const Shape state{problem.linear.states, problem.heads_q, vk ? dv : d, vk ? d : dv};
    if (problem.linear.states > 0 || problem.operation == Operation::linear_decode) {
      slots.push_back({Slot::state, problem.linear.state_type, state});
    }
    slots.push_back({Slot::decay_slopes, DType::fp32, {problem.heads_q}});
  } else if (problem.operation == Operation::combine) {
    const Shape o = query_shape(problem, problem.heads_q, dv);
    slots.push_back({Slot::o_parts, problem.q_type, with_parts(problem.combine.parts, o)});
    slots.push_back({Slot::lse_parts, DType::fp32, with_parts(problem.combine.parts, lse_shape(problem))});
  } else {
    if (problem.operation == Operation::attention) {
      slots.push_back({Slot::q, problem.q_type, query_shape(problem, problem.heads_q, d)});
    } else {
      slots.push_back({Slot::k_new, problem.k_type, query_shape(problem, problem.heads_kv, d)});
      slots.push_back({Slot::v_new, problem.v_type, query_shape(problem, problem.heads_kv, dv)});
    }
    slots.push_back({Slot::k, problem.k_type, key_shape(problem, problem.kv, d)});
    slots.push_back({Slot::v, problem.v_type, key_shape(problem, problem.kv, dv)});
    if (problem.kv2) {
      slots.push_back({Slot::k2, problem.k_type, key_shape(problem, *problem.kv2, d)});
      slots.push_back({Slot::v2, problem.v_type, key_shape(problem, *problem.kv2, dv)});
    }
  }
  if (problem.sink) slots.push_back({Slot::sink, DType::fp32, {problem.heads_q}});
  if (problem.alibi) slots.push_back({Slot::alibi_slopes, DType::fp32, {problem.heads_q}});
  if (problem.mass_prior_lse) slots.push_back({Slot::prior_lse, DType::fp32, lse_shape(problem)});
  if (problem.operation == Operation::attention && problem.pass == Pass::backward) add_backward_inputs(problem, slots);
  return slots;
}

std::vector<SlotShape> outputs(const Problem& problem) {
  std::vector<SlotShape> slots;
  if (problem.operation == Operation::kv_append || problem.only_flushes()) return slots;
  if (problem.is_linear() && problem.pass == Pass::backward) {
    const std::int64_t d = problem.head_dim_qk, dv = problem.head_dim_v;
    slots.push_back({Slot::dq, problem.q_type, query_shape(problem, problem.heads_q, d)});
    slots.push_back({Slot::dk, problem.k_type, query_shape(problem, problem.heads_q, d)});
    slots.push_back({Slot::dv, problem.v_type, query_shape(problem, problem.heads_q, dv)});
  } else if (problem.pass == Pass::backward) {
    add_gradients(problem, slots);
  } else {
    const Shape o = query_shape(problem, problem.heads_q, problem.head_dim_v);
    slots.push_back({Slot::o, problem.o_type, o});
    if (problem.residual) slots.push_back({Slot::o_residual, DType::int8, o});
    if (problem.lse) slots.push_back({Slot::lse, DType::fp32, lse_shape(problem)});
    if (problem.operation == Operation::attention) add_tile_outputs(problem, slots);
  }
  return slots;
}

void allocate_outputs(const Problem& problem, Arrays& arrays) {
  for (const SlotShape& slot : outputs(problem)) {
    if (!arrays[slot.slot]) arrays[slot.slot] = files::Array(slot.dtype, slot.shape, to_string(slot.slot));
  }
}

Bindings bindings_of(const Arrays& arrays) {
  Bindings bindings;
  for (const auto& [slot, array] : arrays) bindings[slot] = array.tensor();
  return bindings;
}

}  // namespace tessera::cli
