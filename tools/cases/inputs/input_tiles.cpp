// SPDX-License-Identifier: Apache-2.0
// Lists of tiles of a case, and the tensors of tiles that a run writes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "bindings/slot_rules.h"
#include "cases/inputs/inputs.h"
#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

using reference::TileState;

/// (batches, heads, query blocks, key blocks)
struct TileChoice {
  std::int64_t batches, heads, query_blocks, key_blocks;
  std::vector<TileState> states;
  [[nodiscard]] TileState at(std::int64_t b, std::int64_t h, std::int64_t qb, std::int64_t kb) const {
    return states[static_cast<std::size_t>(((b * heads + h) * query_blocks + qb) * key_blocks + kb)];
  }
};

TileChoice choose_tiles(const Problem& problem, const TileList& list, float density, RandomNumbers random) {
  TileChoice choice{
      list.per_batch ? problem.batch : 1, problem.list_heads(list), problem.query_blocks(), problem.key_blocks(), {}};
  choice.states.resize(
      static_cast<std::size_t>(choice.batches * choice.heads * choice.query_blocks * choice.key_blocks));
  for (TileState& state : choice.states) {
    const bool listed = random.chance(density);
    const bool full = list.full && random.chance(0.5);
    state = !listed ? TileState::skipped : full ? TileState::full : TileState::partial;
  }
  return choice;
}

/// Where the tiles of a state are listed.
struct StateSlots {
  Slot counts, indices, bits;
};

StateSlots slots_of(bool backward, TileState state) {
  const detail::ListSlots& list = detail::list_slots(backward);
  if (state == TileState::partial) return {list.counts, list.indices, list.bits};
  return {list.full_counts, list.full_indices, list.full_bits};
}

/// Sorted minor blocks of every (batch, head, major block).
std::vector<std::vector<std::int64_t>> entries_of(const TileChoice& choice, bool by_key, TileState state) {
  std::vector<std::vector<std::int64_t>> rows;
  const std::int64_t majors = by_key ? choice.key_blocks : choice.query_blocks;
  const std::int64_t minors = by_key ? choice.query_blocks : choice.key_blocks;
  for (std::int64_t row = 0; row < choice.batches * choice.heads * majors; ++row) {
    std::vector<std::int64_t>& entries = rows.emplace_back();
    const std::int64_t b = row / majors / choice.heads;
    const std::int64_t h = row / majors % choice.heads;
    for (std::int64_t minor = 0; minor < minors; ++minor) {
      const std::int64_t qb = by_key ? minor : row % majors;
      const std::int64_t kb = by_key ? row % majors : minor;
      if (choice.at(b, h, qb, kb) == state) entries.push_back(minor);
    }
  }
  return rows;
}

}  // namespace

void Inputs::bind_list(const TileList& list, bool backward) {
  if (!list) return;
  const auto stream = static_cast<std::uint64_t>(backward ? Slot::bwd_tile_counts : Slot::tile_counts);
  const TileChoice choice = choose_tiles(problem_, list, values_.density, RandomNumbers(values_.seed, stream));
  for (const TileState state : {TileState::partial, TileState::full}) {
    if (state == TileState::full && !list.full) continue;
    const StateSlots slots = slots_of(backward, state);
    const bool by_key = list.form == TileList::Form::transposed;
    const auto rows = entries_of(choice, by_key, state);
    const std::int64_t majors = by_key ? choice.key_blocks : choice.query_blocks;
    if (list.form == TileList::Form::bitmask) {
      const std::int64_t words = (choice.key_blocks + 31) / 32;
      const bool moves_on = problem_.skip && !backward;
      const Tensor& bits = allocate(slots.bits, DType::uint32, {choice.batches, choice.heads, majors, words}, moves_on);
      for (std::size_t row = 0; row < rows.size(); ++row) {
        std::vector<std::uint32_t> mask(static_cast<std::size_t>(words), 0);
        for (const std::int64_t block : rows[row]) mask[static_cast<std::size_t>(block / 32)] |= 1U << (block % 32);
        for (std::size_t w = 0; w < mask.size(); ++w) {
          reference::write(bits, static_cast<std::int64_t>(row) * words + static_cast<std::int64_t>(w), mask[w]);
        }
      }
      continue;
    }
    std::size_t longest = 0;
    for (const auto& row : rows) longest = std::max(longest, row.size());
    const auto capacity = static_cast<std::int64_t>(longest);
    const Tensor counts = allocate(slots.counts, DType::int32, {choice.batches, choice.heads, majors});
    const Tensor indices = allocate(slots.indices, DType::int32, {choice.batches, choice.heads, majors, capacity});
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto at = static_cast<std::int64_t>(row);
      reference::write(counts, at, static_cast<double>(rows[row].size()));
      for (std::size_t entry = 0; entry < rows[row].size(); ++entry) {
        reference::write(indices, at * capacity + static_cast<std::int64_t>(entry),
                         static_cast<double>(rows[row][entry]));
      }
    }
  }
}

void Inputs::bind_tile_outputs() {
  const std::int64_t query_blocks = problem_.query_blocks();
  const std::int64_t key_blocks = problem_.key_blocks();
  if (problem_.mass != MassKind::none) {
    allocate(Slot::tile_mass, DType::fp32, {problem_.batch, problem_.heads_q, query_blocks, key_blocks}, true);
  }
  if (problem_.next == TileList::Form::indices) {
    allocate(Slot::next_counts, DType::int32, {problem_.batch, problem_.heads_q, query_blocks}, true);
    allocate(Slot::next_indices, DType::int32, {problem_.batch, problem_.heads_q, query_blocks, key_blocks}, true);
  } else if (problem_.next == TileList::Form::bitmask) {
    allocate(Slot::next_bits, DType::uint32, {problem_.batch, problem_.heads_q, query_blocks, (key_blocks + 31) / 32},
             true);
  }
  if (problem_.mass_prior_lse) {
    // About what the LSE of so many N(0, 1) scores is.
    const auto keys = static_cast<double>(problem_.kv.seqlen + (problem_.kv2 ? problem_.kv2->seqlen : 0));
    allocate(Slot::prior_lse, DType::fp32, lse_shape());
    fill_lse(Slot::prior_lse, std::log(std::max(1.0, keys)) + 0.5, 0.3, 0.05);
  }
}

/// A skip state in the middle of a run, and what a step is told.
void Inputs::bind_skip() {
  if (!problem_.skip) return;
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::skip_threshold));
  const bool by_mass = problem_.skip.kind == SkipRule::Kind::mass;
  const Tensor& thresholds = allocate(Slot::skip_threshold, DType::fp32, {problem_.heads_q});
  for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
    const double drawn = by_mass ? -5 + 3 * random.normal() : -std::fabs(3 * random.normal());
    const bool warm_up = values_.seed % 5 == 0 && h == 0;
    reference::write(thresholds, h,
                     warm_up ? -std::numeric_limits<double>::infinity() : std::min(drawn, by_mass ? 1.5 : 0.0));
  }
  if (values_.seed % 2 == 0) bind_must(random);
  if (!by_mass) {
    allocate_integers(Slot::skip_step, {static_cast<std::int64_t>(values_.seed % 7)});
    return;
  }
  const Tensor& memory =
      allocate(Slot::skip_memory, DType::uint8,
               {problem_.batch, problem_.heads_q, problem_.query_blocks(), problem_.key_blocks()}, true);
  reference::for_each_element(memory, [&](std::int64_t, std::int64_t offset) {
    reference::write(memory, offset, std::clamp(std::round(200 + 30 * random.normal()), 0.0F, 255.0F));
  });
  const auto keys = static_cast<double>(problem_.kv.seqlen + (problem_.kv2 ? problem_.kv2->seqlen : 0));
  allocate(Slot::skip_lse, DType::fp32, lse_shape(), true);
  const double too_small = values_.seed % 3 == 0 ? 5 : 0;  // rows weigh as much as a state can remember, and more
  fill_lse(Slot::skip_lse, std::log(std::max(1.0, keys)) + 0.5 - too_small, 0.3, 0.01);
}

/// A tenth of the key blocks must be computed, as many left out.
void Inputs::bind_must(RandomNumbers& random) {
  const std::int64_t words = (problem_.key_blocks() + 31) / 32;
  std::vector<std::uint32_t> done(static_cast<std::size_t>(words), 0);
  std::vector<std::uint32_t> skipped = done;
  for (std::int64_t block = 1; block < problem_.key_blocks(); ++block) {  // the first is left
    const bool must_do = random.chance(0.1);
    if (must_do || random.chance(0.1)) {
      (must_do ? done : skipped)[static_cast<std::size_t>(block / 32)] |= 1U << (block % 32);
    }
  }
  const auto bind = [&](Slot slot, const std::vector<std::uint32_t>& bits) {
    const Tensor& tensor = allocate(slot, DType::uint32, {words});
    for (std::int64_t w = 0; w < words; ++w) reference::write(tensor, w, bits[static_cast<std::size_t>(w)]);
  };
  bind(Slot::must_do_bits, done);
  bind(Slot::must_skip_bits, skipped);
}

}  // namespace tessera::cases
