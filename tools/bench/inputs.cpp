// SPDX-License-Identifier: Apache-2.0
#include "bench/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "bindings/slot_rules.h"
#include "cases/inputs/inputs.h"
#include "cases/inputs/poison.h"
#include "files/convert.h"

namespace tessera::cli {
namespace {

using files::Array;

// Drawing is slow: what is longer repeats these, which are an odd number so that rows do not.
constexpr std::int64_t kDrawn = (std::int64_t{1} << 21) + 4099;

void fill_normal(const Tensor& tensor, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  const std::int64_t count = tensor.numel();
  const std::int64_t drawn = std::min(count, kDrawn);
  const float gain = size_of(tensor.dtype) == 1 ? static_cast<float>(cases::kQuantisedGain) : 1.0F;
  for (std::int64_t at = 0; at < drawn; ++at) files::store_float(tensor, at, gain * normal(random));
  auto* bytes = static_cast<std::byte*>(tensor.data);
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  for (std::int64_t at = drawn; at < count; at += drawn) {
    std::memcpy(bytes + at * size, bytes, static_cast<std::size_t>(std::min(drawn, count - at) * size));
  }
}

// Of elements that fill_normal has drawn.
constexpr auto kDescale = static_cast<float>(1 / cases::kQuantisedGain);

bool is_descale(Slot slot) {
  return slot == Slot::q_descale || slot == Slot::k_descale || slot == Slot::v_descale || slot == Slot::x_descale;
}

Array int32_array(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& values) {
  Array array(DType::int32, shape);
  auto* target = array.tensor().as<std::int32_t>();
  for (std::size_t at = 0; at < values.size(); ++at) target[at] = static_cast<std::int32_t>(values[at]);
  return array;
}

Array int32_array(const std::vector<std::int64_t>& values) {
  return int32_array({static_cast<std::int64_t>(values.size())}, values);
}

std::vector<std::int64_t> same(std::int64_t batch, std::int64_t length) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(batch), length);
}

Array equal_ends(std::int64_t batch, std::int64_t longest, std::int64_t total) {
  const std::int64_t each = equal_length(batch, longest, total);
  std::vector<std::int64_t> ends;
  for (std::int64_t at = 0; at <= batch; ++at) ends.push_back(at * each);
  return int32_array({batch + 1}, ends);
}

Array ends_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> ends{0};
  for (const std::int64_t length : lengths) ends.push_back(ends.back() + length);
  return int32_array(ends);
}

// `lengths`: of the sequences' keys.
void add_source(const Problem& problem, const KvSource& source, const detail::SourceSlots& slots,
                const std::vector<std::int64_t>& lengths, std::mt19937_64& random, Arrays& arrays) {
  const std::int64_t batch = problem.batch;
  if (source.layout == KvLayout::varlen) arrays[slots.cu_seqlens] = equal_ends(batch, source.seqlen, source.total);
  const bool appends = problem.operation == Operation::kv_append;
  // kv_append: the cache holds all but the new tokens.
  const std::int64_t before = std::max<std::int64_t>(0, source.seqlen - problem.seqlen_q);
  if (source.seqused) arrays[slots.seqused] = int32_array(appends ? same(batch, before) : lengths);
  if (source.page_size == 0) return;
  const std::int64_t columns = (source.seqlen + source.page_size - 1) / source.page_size;
  std::vector<std::int64_t> pages(static_cast<std::size_t>(source.pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<std::int64_t> ids;  // a pool that is too small is shared by the sequences
  for (std::int64_t at = 0; at < batch * columns; ++at)
    ids.push_back(pages[static_cast<std::size_t>(at) % pages.size()]);
  if (source.layout == KvLayout::paged_table) {
    arrays[slots.page_table] = int32_array({batch, columns}, ids);
    return;
  }
  std::vector<std::int64_t> counts, indices, last;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    counts.push_back((length + source.page_size - 1) / source.page_size);
    indices.insert(indices.end(), ids.begin() + b * columns, ids.begin() + b * columns + counts.back());
    last.push_back(length == 0 ? 0 : (length - 1) % source.page_size + 1);
  }
  arrays[slots.page_indptr] = ends_of(counts);
  arrays[slots.page_indices] = int32_array(indices);
  if (!appends) arrays[slots.last_page_len] = int32_array(last);
}

// One (batch, head): in every query block, `density` of the key blocks that any of its rows sees, drawn at random.
KeptTiles draw_tiles(const Problem& problem, double density, std::mt19937_64& random) {
  const std::int64_t rows = problem.query_blocks(), columns = problem.key_blocks();
  KeptTiles kept(static_cast<std::size_t>(rows * columns), false);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t last_row = std::min(problem.seqlen_q, (row + 1) * problem.block_q) - 1;
    const std::int64_t begin = visible_keys(problem, row * problem.block_q).first / problem.block_kv;
    const std::int64_t end = (visible_keys(problem, last_row).second + problem.block_kv - 1) / problem.block_kv;
    std::vector<std::int64_t> blocks(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
    std::iota(blocks.begin(), blocks.end(), begin);
    std::shuffle(blocks.begin(), blocks.end(), random);
    if (blocks.empty()) continue;
    const auto wanted = std::llround(density * static_cast<double>(blocks.size()));
    blocks.resize(static_cast<std::size_t>(std::max<std::int64_t>(1, wanted)));
    for (const std::int64_t block : blocks) kept[static_cast<std::size_t>(row * columns + block)] = true;
  }
  return kept;
}

// Stores the kept tiles in the list's form; of a list with full entries the full part stays empty.
void add_list(const Problem& problem, const TileList& list, const detail::ListSlots& slots,
              const std::vector<KeptTiles>& kept, Arrays& arrays) {
  const std::int64_t batch = list.per_batch ? problem.batch : 1, heads = problem.list_heads(list);
  const std::int64_t query_blocks = problem.query_blocks(), key_blocks = problem.key_blocks();
  const bool by_key = list.form == TileList::Form::transposed;
  const std::int64_t lines = by_key ? key_blocks : query_blocks, entries = by_key ? query_blocks : key_blocks;
  const bool bits = list.form == TileList::Form::bitmask;
  const std::int64_t words = (key_blocks + 31) / 32;
  Array counts(DType::int32, {batch, heads, lines});
  Array payload(bits ? DType::uint32 : DType::int32, {batch, heads, lines, bits ? words : entries});
  std::fill_n(payload.data(), payload.size_bytes(), std::byte{0});
  for (std::size_t which = 0; which < kept.size(); ++which) {
    for (std::int64_t line = 0; line < lines; ++line) {
      const std::int64_t at = static_cast<std::int64_t>(which) * lines + line;
      std::int32_t found = 0;
      for (std::int64_t entry = 0; entry < entries; ++entry) {
        const std::int64_t tile = by_key ? entry * key_blocks + line : line * key_blocks + entry;
        if (!kept[which][static_cast<std::size_t>(tile)]) continue;
        if (bits) {
          payload.tensor().as<std::uint32_t>()[at * words + entry / 32] |= 1U << (entry % 32);
        } else {
          payload.tensor().as<std::int32_t>()[at * entries + found] = static_cast<std::int32_t>(entry);
        }
        ++found;
      }
      counts.tensor().as<std::int32_t>()[at] = found;
    }
  }
  if (list.full) {
    Array none(payload.dtype(), payload.shape());
    std::fill_n(none.data(), none.size_bytes(), std::byte{0});
    arrays[bits ? slots.full_bits : slots.full_indices] = std::move(none);
    if (!bits)
      arrays[slots.full_counts] = int32_array(counts.shape(), std::vector<std::int64_t>(counts.size_bytes() / 4));
  }
  arrays[bits ? slots.bits : slots.indices] = std::move(payload);
  if (!bits) arrays[slots.counts] = std::move(counts);
}

void add_values(const BenchCase& bench_case, std::mt19937_64& random, Arrays& arrays) {
  const Problem& problem = bench_case.problem;
  for (const SlotShape& slot : value_inputs(problem)) {
    Array array(slot.dtype, slot.shape, to_string(slot.slot));
    if (slot.slot == Slot::o_residual) {
      // Whatever a forward could have left of o.
      auto* const bytes = array.tensor().as<std::int8_t>();
      std::generate_n(bytes, array.size_bytes(),
                      [&] { return static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127); });
    } else {
      fill_normal(array.tensor(), random);
    }
    if (is_descale(slot.slot)) std::fill_n(array.tensor().as<float>(), array.tensor().numel(), kDescale);
    if (slot.slot == Slot::alibi_slopes || slot.slot == Slot::decay_slopes) {  // positive, as ALiBi's are
      for (std::int64_t head = 0; head < problem.heads_q; ++head) {
        array.tensor().as<float>()[head] =
            std::exp2(-8.0F * static_cast<float>(head + 1) / static_cast<float>(problem.heads_q));
      }
    }
    arrays[slot.slot] = std::move(array);
  }
}

// As sequences that began at any time have them: of the steps from one flush to the next as many are at each, within a
// call or over the calls in a row.
Array staggered_cursors(const Problem& problem, std::int64_t call) {
  const std::int64_t tokens = std::max<std::int64_t>(problem.seqlen_q, 1), steps = problem.linear.ring / tokens;
  std::vector<std::int64_t> cursors;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const std::int64_t at = b + call;
    cursors.push_back(at / steps % 2 * (problem.linear.ring + 1) + tokens * (1 + at % steps));
  }
  return int32_array({problem.batch}, cursors);
}

// All states, as many for each call as there are sequences.
void add_state_slots(const BenchCase& bench_case, std::mt19937_64& random, BenchInputs& inputs) {
  const Problem& problem = bench_case.problem;
  std::vector<std::int64_t> slots(static_cast<std::size_t>(problem.linear.states));
  std::iota(slots.begin(), slots.end(), 0);
  if (!bench_case.slots_in_order) std::shuffle(slots.begin(), slots.end(), random);
  const std::int64_t batch = problem.batch;
  const auto slots_of = [&](std::int64_t call) {
    return int32_array({batch}, {slots.begin() + call * batch, slots.begin() + (call + 1) * batch});
  };
  const std::int64_t calls = batch == 0 ? 1 : std::min<std::int64_t>(problem.linear.states / batch, 100);
  for (std::int64_t call = 0; calls > 1 && call < calls; ++call) {
    inputs.slots_by_call.push_back(slots_of(call));
    if (problem.linear.ring > 0) inputs.cursors.push_back(staggered_cursors(problem, call));
  }
  if (calls > 0) inputs.arrays[Slot::state_slots] = slots_of(0);
  if (problem.linear.ring > 0) inputs.arrays[Slot::ring_cursor] = staggered_cursors(problem, 0);
}

// A state whose list stays as it was drawn for some hundred steps: what is listed weighs more than the threshold, and
// the memory of what is not is far below.
void add_skip(const Problem& problem, Arrays& arrays) {
  const bool by_mass = problem.skip.kind == SkipRule::Kind::mass;
  const auto fill = [](Array& array, float value) {
    std::fill_n(array.tensor().as<float>(), array.tensor().numel(), value);
  };
  fill(arrays[Slot::skip_threshold], by_mass ? -16.0F : -std::numeric_limits<float>::infinity());
  if (!by_mass) {
    arrays[Slot::skip_step] = int32_array({0});
    return;
  }
  Array memory(DType::uint8, {problem.batch, problem.heads_q, problem.query_blocks(), problem.key_blocks()});
  std::fill_n(memory.data(), memory.size_bytes(), std::byte{0});
  arrays[Slot::skip_memory] = std::move(memory);
  fill(arrays[Slot::skip_lse], std::log(static_cast<float>(std::max<std::int64_t>(problem.kv.seqlen, 1))) + 0.5F);
}

}  // namespace

BenchInputs make_inputs(const BenchCase& bench_case, std::uint64_t seed) {
  const Problem& problem = bench_case.problem;
  std::mt19937_64 random(seed);
  BenchInputs inputs;
  add_values(bench_case, random, inputs.arrays);
  if (problem.q_layout == Layout::varlen) {
    inputs.arrays[Slot::cu_seqlens_q] = equal_ends(problem.batch, problem.seqlen_q, problem.total_q);
  }
  if (problem.seqused_q) inputs.arrays[Slot::seqused_q] = int32_array(same(problem.batch, problem.seqlen_q));
  if (problem.operation == Operation::attention || problem.operation == Operation::kv_append) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < problem.batch; ++b) lengths.push_back(bench_case.key_length(b));
    add_source(problem, problem.kv, detail::source_slots(false), lengths, random, inputs.arrays);
  }
  if (problem.operation == Operation::linear_decode) add_state_slots(bench_case, random, inputs);
  if (problem.kv2) {
    const std::vector<std::int64_t> full = same(problem.batch, problem.kv2->seqlen);
    add_source(problem, *problem.kv2, detail::source_slots(true), full, random, inputs.arrays);
  }
  if (problem.append.rotary != Rotary::none) {
    for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) {
      Array table(DType::fp32, {problem.kv.seqlen, problem.append.rotary_dim / 2});
      fill_normal(table.tensor(), random);
      inputs.arrays[slot] = std::move(table);
    }
  }
  const auto add = [&](const TileList& list, const detail::ListSlots& slots) {
    if (!list) return;
    inputs.kept.clear();
    const std::int64_t rows = (list.per_batch ? problem.batch : 1) * problem.list_heads(list);
    for (std::int64_t row = 0; row < rows; ++row) {
      inputs.kept.push_back(draw_tiles(problem, bench_case.density, random));
    }
    add_list(problem, list, slots, inputs.kept, inputs.arrays);
  };
  add(problem.list, detail::list_slots(false));
  add(problem.bwd_list, detail::list_slots(true));
  if (problem.skip) add_skip(problem, inputs.arrays);
  if (!bench_case.lengths.empty()) {
    inputs.arrays[Slot::cu_seqlens_q] = ends_of(bench_case.lengths);
    if (problem.kv.layout == KvLayout::varlen) inputs.arrays[Slot::cu_seqlens_k] = ends_of(bench_case.lengths);
  }
  if (problem.operation == Operation::attention) {
    const Bindings bindings = bindings_of(inputs.arrays);
    cases::apply_input_kind(bench_case.inputs, problem, bindings);
    if (bench_case.inputs.kind == cases::InputKind::Kind::nan_tail) cases::poison_unused_keys(problem, bindings);
  }
  allocate_outputs(problem, inputs.arrays);
  // Touched before the first run, so that the memory measured there is the run's own.
  for (const SlotShape& slot : outputs(problem)) {
    std::fill_n(inputs.arrays[slot.slot].data(), inputs.arrays[slot.slot].size_bytes(), std::byte{0});
  }
  return inputs;
}

}  // namespace tessera::cli
