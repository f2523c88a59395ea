// SPDX-License-Identifier: Apache-2.0
// What linear_decode binds.
#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "cases/inputs.h"
#include "cpu/reference_number.h"
#include "tessera/error.h"

namespace tessera::cases {

/// Tokens of sequences that are skipped and states that nobody reads stay poisoned.
void Inputs::bind_linear_decode() {
  bind_state_slots();
  const std::int64_t heads = problem_.heads_q;
  const Tensor& slots = bindings_[Slot::state_slots];
  const auto source = [&](std::int64_t b) { return slots ? static_cast<std::int64_t>(reference::read(slots, b)) : b; };
  const auto fill_first = [&](Slot slot, std::int64_t index, RandomNumbers& random) {
    Tensor one = bindings_[slot];
    one.byte_offset += index * one.strides[0] * static_cast<std::int64_t>(size_of(one.dtype));
    one.shape[0] = 1;
    reference::for_each_element(
        one, [&](std::int64_t, std::int64_t offset) { reference::write(one, offset, random.normal()); });
  };
  const auto tokens = [&](Slot slot, DType dtype, std::int64_t dim) {
    allocate(slot, dtype, query_shape(heads, dim));
    RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      if (source(b) >= 0) fill_first(slot, b, random);
    }
  };
  tokens(Slot::q, problem_.q_type, problem_.head_dim_qk);
  tokens(Slot::k, problem_.k_type, problem_.head_dim_qk);
  tokens(Slot::v, problem_.v_type, problem_.head_dim_v);
  allocate(Slot::o, problem_.o_type, query_shape(heads, problem_.head_dim_v), true);
  const bool vk = problem_.state_layout == StateLayout::vk;
  allocate(Slot::state, problem_.state_type,
           {problem_.slots, heads, vk ? problem_.head_dim_v : problem_.head_dim_qk,
            vk ? problem_.head_dim_qk : problem_.head_dim_v},
           true);
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::state));
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    if (source(b) >= 0 && source(b) < problem_.slots) fill_first(Slot::state, source(b), random);
  }
  // From the slopes of ALiBi to one that forgets nearly everything at once.
  const Tensor& slopes = allocate(Slot::decay_slopes, DType::fp32, {heads});
  for (std::int64_t h = 0; h < heads; ++h) {
    const double slope = std::exp2(3.0 - 8.0 * static_cast<double>(h + 1) / static_cast<double>(heads));
    reference::write(slopes, h, values_.no_decay ? 0.0 : slope);
  }
}

void Inputs::bind_state_slots() {
  const DType dtype = values_.long_slots ? DType::int64 : DType::int32;
  const auto check_count = [&](const char* name, const std::vector<std::int64_t>& list) {
    if (static_cast<std::int64_t>(list.size()) == problem_.batch) return;
    throw Error(ErrorCode::invalid_argument, name, fmt::format("{} values", list.size()),
                fmt::format("{}", problem_.batch));
  };
  if (!values_.unbound_slots) {
    std::vector<std::int64_t> slots = values_.state_slots;
    if (slots.empty()) {
      if (problem_.slots < problem_.batch) {
        throw Error(
            ErrorCode::invalid_argument, "state_slots", "no values",
            fmt::format("values: {} sequences have no states of their own in {}", problem_.batch, problem_.slots));
      }
      slots.resize(static_cast<std::size_t>(problem_.slots));
      std::iota(slots.begin(), slots.end(), 0);
      RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::state_slots));
      for (std::int64_t i = problem_.slots - 1; i > 0; --i) {
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
