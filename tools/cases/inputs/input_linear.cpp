// SPDX-License-Identifier: Apache-2.0
// What linear_decode and linear_chunk bind.
#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "cases/inputs/inputs.h"
#include "cpu/reference/number.h"
#include "tessera/error.h"

namespace tessera::cases {

namespace {

/// One index of the first dimension.
void fill_index(Tensor one, std::int64_t index, RandomNumbers& random) {
  one.byte_offset += index * one.strides[0] * static_cast<std::int64_t>(size_of(one.dtype));
  one.shape[0] = 1;
  reference::for_each_element(
      one, [&](std::int64_t, std::int64_t offset) { reference::write(one, offset, random.normal()); });
}

/// `count` indices of the second-innermost of four dimensions, from `begin` on, at index `outer` of the first.
void fill_rows(Tensor rows, std::int64_t outer, std::int64_t begin, std::int64_t count, RandomNumbers& random) {
  rows.byte_offset += begin * rows.strides[2] * static_cast<std::int64_t>(size_of(rows.dtype));
  rows.shape[2] = count;
  fill_index(rows, outer, random);
}

}  // namespace

/// Tokens of sequences that are skipped and states that nobody reads stay poisoned.
void Inputs::bind_linear_decode() {
  bind_state_slots();
  const std::int64_t heads = problem_.heads_q;
  const Tensor& slots = bindings_[Slot::state_slots];
  const auto source = [&](std::int64_t b) { return slots ? static_cast<std::int64_t>(reference::read(slots, b)) : b; };
  const auto tokens = [&](Slot slot, DType dtype, std::int64_t dim) {
    allocate(slot, dtype, query_shape(heads, dim));
    RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      if (source(b) >= 0) fill_index(bindings_[slot], b, random);
    }
  };
  if (problem_.linear.rounding == Rounding::stochastic) bind_seeds();
  if (problem_.linear.ring > 0) bind_ring();
  bind_pool();
  if (problem_.only_flushes()) return;
  tokens(Slot::q, problem_.q_type, problem_.head_dim_qk);
  tokens(Slot::k, problem_.k_type, problem_.head_dim_qk);
  tokens(Slot::v, problem_.v_type, problem_.head_dim_v);
  allocate(Slot::o, problem_.o_type, query_shape(heads, problem_.head_dim_v), true);
}

/// Cursors, and tokens that wait; all other rows of the rings stay poisoned.
void Inputs::bind_ring() {
  const std::int64_t ring = problem_.linear.ring;
  std::vector<std::int64_t> cursors = values_.ring_cursors;
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::ring_cursor));
  for (std::int64_t b = 0; values_.ring_cursors.empty() && b < problem_.batch; ++b) {
    cursors.push_back(random.below(2 * ring + 2));
  }
  check_count("ring_cursors", cursors);
  allocate_integers(Slot::ring_cursor, cursors);
  const Tensor& slots = bindings_[Slot::state_slots];
  const auto rows = [&](Slot slot, DType dtype, std::int64_t dim) {
    const Tensor& tensor = allocate(slot, dtype, {problem_.linear.states, problem_.heads_q, 2 * ring, dim}, true);
    RandomNumbers numbers(values_.seed, static_cast<std::uint64_t>(slot));
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const std::int64_t source = slots ? static_cast<std::int64_t>(reference::read(slots, b)) : b;
      const std::int64_t cursor = cursors[static_cast<std::size_t>(b)];
      if (source < 0 || source >= problem_.linear.states || cursor < 0 || cursor > 2 * ring + 1) continue;
      fill_rows(tensor, source, cursor / (ring + 1) * ring, cursor % (ring + 1), numbers);
    }
  };
  rows(Slot::ring_k, problem_.k_type, problem_.head_dim_qk);
  rows(Slot::ring_v, problem_.v_type, problem_.head_dim_v);
}

/// Sequences from zeros and such without a destination are told by negative slots; a forward writes to the pool.
void Inputs::bind_linear_chunk() {
  bind_query_lengths();
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  const std::int64_t heads = problem_.heads_q, d = problem_.head_dim_qk, dv = problem_.head_dim_v;
  const bool forward = problem_.pass == Pass::forward;
  const auto rows = [&](Slot slot, DType dtype, std::int64_t dim, bool output) {
    allocate(slot, dtype, query_shape(heads, dim), output);
    if (!output) fill_queries(slot);
  };
  rows(Slot::q, problem_.q_type, d, false);
  rows(Slot::k, problem_.k_type, d, false);
  rows(Slot::v, problem_.v_type, dv, false);
  if (forward) {
    rows(Slot::o, problem_.o_type, dv, true);
  } else {
    rows(Slot::dout, problem_.o_type, dv, false);
    rows(Slot::dq, problem_.q_type, d, true);
    rows(Slot::dk, problem_.k_type, d, true);
    rows(Slot::dv, problem_.v_type, dv, true);
  }
  if (problem_.linear.states > 0) bind_state_slots();
  bind_pool();
  if (forward || problem_.linear.states == 0 || values_.unbound_gradients) return;
  const bool vk = problem_.linear.state_layout == StateLayout::vk;
  const std::vector<std::int64_t> shape{problem_.batch, heads, vk ? dv : d, vk ? d : dv};
  allocate(Slot::dstate_final, DType::fp32, shape);
  fill(Slot::dstate_final);
  allocate(Slot::dstate_initial, DType::fp32, shape, true);
}

/// States, of which only those that a sequence begins with are filled, and slopes.
void Inputs::bind_pool() {
  const std::int64_t heads = problem_.heads_q;
  const Tensor& slots = bindings_[Slot::state_slots];
  const bool vk = problem_.linear.state_layout == StateLayout::vk;
  const bool has_pool = problem_.operation == Operation::linear_decode || problem_.linear.states > 0;
  if (has_pool)
    allocate(Slot::state, problem_.linear.state_type,
             {problem_.linear.states, heads, vk ? problem_.head_dim_v : problem_.head_dim_qk,
              vk ? problem_.head_dim_qk : problem_.head_dim_v},
             problem_.pass == Pass::forward);
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::state));
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const std::int64_t source = slots ? static_cast<std::int64_t>(reference::read(slots, b)) : b;
    if (source >= 0 && source < problem_.linear.states) fill_index(bindings_[Slot::state], source, random);
  }
  // From the slopes of ALiBi to one that forgets nearly everything at once.
  const Tensor& slopes = allocate(Slot::decay_slopes, DType::fp32, {heads});
  for (std::int64_t h = 0; h < heads; ++h) {
    const double slope = std::exp2(3.0 - 8.0 * static_cast<double>(h + 1) / static_cast<double>(heads));
    reference::write(slopes, h, values_.no_decay ? 0.0 : slope);
  }
}

void Inputs::check_count(const char* name, const std::vector<std::int64_t>& list) const {
  if (static_cast<std::int64_t>(list.size()) == problem_.batch) return;
  throw Error(ErrorCode::invalid_argument, name, fmt::format("{} values", list.size()),
              fmt::format("{}", problem_.batch));
}

void Inputs::bind_state_slots() {
  const DType dtype = values_.long_slots ? DType::int64 : DType::int32;
  if (!values_.unbound_slots) {
    std::vector<std::int64_t> slots = values_.state_slots;
    if (slots.empty()) {
      if (problem_.linear.states < problem_.batch) {
        throw Error(ErrorCode::invalid_argument, "state_slots", "no values",
                    fmt::format("values: {} sequences have no states of their own in {}", problem_.batch,
                                problem_.linear.states));
      }
      slots.resize(static_cast<std::size_t>(problem_.linear.states));
      std::iota(slots.begin(), slots.end(), 0);
      RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::state_slots));
      for (std::int64_t i = problem_.linear.states - 1; i > 0; --i) {
        std::swap(slots[static_cast<std::size_t>(i)], slots[static_cast<std::size_t>(random.below(i + 1))]);
      }
      slots.resize(static_cast<std::size_t>(problem_.batch));
    }
    check_count("state_slots", slots);
    allocate_integers(Slot::state_slots, slots, dtype);
  }
  if (values_.dest_slots.empty()) return;
  check_count("dest_slots", values_.dest_slots);
  allocate_integers(Slot::dest_slots, values_.dest_slots, dtype);
}

}  // namespace tessera::cases
