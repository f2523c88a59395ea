// SPDX-License-Identifier: Apache-2.0
// Lengths, pages and positions of a case's sequences.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "cases/inputs/inputs.h"
#include "cpu/reference/number.h"
#include "tessera/error.h"

namespace tessera::cases {
namespace {

/// One value for each sequence from a list that holds as many, or one for all.
std::vector<std::int64_t> spread(const char* name, const std::vector<std::int64_t>& list, std::int64_t batch) {
  if (list.size() == 1) return std::vector<std::int64_t>(static_cast<std::size_t>(batch), list[0]);
  if (static_cast<std::int64_t>(list.size()) == batch) return list;
  throw Error(ErrorCode::invalid_argument, name, fmt::format("{} values", list.size()), fmt::format("1 or {}", batch));
}

/// The given lengths, or as many full ones as the token capacity holds.
std::vector<std::int64_t> varlen_lengths(const char* name, const std::vector<std::int64_t>& given, std::int64_t batch,
                                         std::int64_t longest, std::int64_t total) {
  if (!given.empty()) return spread(name, given, batch);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(batch));
  for (std::int64_t& length : lengths) {
    length = std::min(longest, total);
    total -= length;
  }
  return lengths;
}

std::vector<std::int64_t> used_lengths(const char* name, const std::vector<std::int64_t>& given,
                                       const std::vector<std::int64_t>& capacity, RandomNumbers random) {
  if (!given.empty()) {
    std::vector<std::int64_t> lengths = spread(name, given, static_cast<std::int64_t>(capacity.size()));
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      if (lengths[b] >= 0 && lengths[b] <= capacity[b]) continue;
      throw Error(ErrorCode::invalid_argument, name, fmt::format("{} for sequence {}", lengths[b], b),
                  fmt::format("0 to {}", capacity[b]));
    }
    return lengths;
  }
  std::vector<std::int64_t> used;
  for (const std::int64_t length : capacity) used.push_back(random.between(0, length));
  return used;
}

std::vector<std::int64_t> cumulative(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums{0};
  for (const std::int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

}  // namespace

void Inputs::bind_query_lengths() {
  std::vector<std::int64_t> capacity(static_cast<std::size_t>(problem_.batch), problem_.seqlen_q);
  const bool varlen = problem_.q_layout == Layout::varlen;
  if (varlen) {
    capacity = varlen_lengths("lens_q", values_.lens_q, problem_.batch, problem_.seqlen_q, problem_.total_q);
    allocate_integers(Slot::cu_seqlens_q, cumulative(capacity));
  }
  if (!problem_.seqused_q) return;
  const RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::seqused_q));
  allocate_integers(Slot::seqused_q, varlen ? used_lengths("used_q", values_.used_q, capacity, random)
                                            : used_lengths("lens_q", values_.lens_q, capacity, random));
}

void Inputs::bind_key_lengths(std::size_t segment) {
  const KvSource& source = segment == 0 ? problem_.kv : *problem_.kv2;
  const reference::SegmentSlots& slots = reference::segment_slots(segment);
  const char* lens_name = segment == 0 ? "lens_k" : "lens_k2";
  const std::vector<std::int64_t>& lens = segment == 0 ? values_.lens_k : values_.lens_k2;
  const RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slots.seqused));
  std::vector<std::int64_t> capacity(static_cast<std::size_t>(problem_.batch), source.seqlen);
  if (source.layout == KvLayout::varlen) {
    capacity = varlen_lengths(lens_name, lens, problem_.batch, source.seqlen, source.total);
    allocate_integers(slots.cu_seqlens, cumulative(capacity));
    if (source.seqused) {
      const char* used_name = segment == 0 ? "used_k" : "used_k2";
      const std::vector<std::int64_t>& used = segment == 0 ? values_.used_k : values_.used_k2;
      allocate_integers(slots.seqused, used_lengths(used_name, used, capacity, random));
    }
    return;
  }
  if (problem_.operation == Operation::kv_append) {
    // Room for the new tokens must be left.
    const Tensor& used_q = bindings_[Slot::seqused_q];
    const Tensor& cu_q = bindings_[Slot::cu_seqlens_q];
    std::vector<std::int64_t> after(capacity.size());
    for (std::size_t b = 0; b < capacity.size(); ++b) {
      const auto at = static_cast<std::int64_t>(b);
      after[b] = static_cast<std::int64_t>(used_q ? reference::read(used_q, at)
                                           : cu_q ? reference::read(cu_q, at + 1) - reference::read(cu_q, at)
                                                  : static_cast<double>(problem_.seqlen_q));
      capacity[b] = std::max<std::int64_t>(0, capacity[b] - after[b]);
    }
    const std::vector<std::int64_t> before = used_lengths(lens_name, lens, capacity, random);
    for (std::size_t b = 0; b < after.size(); ++b) after[b] += before[b];
    allocate_integers(slots.seqused, before);
    if (source.layout != KvLayout::dense) bind_pages(segment, after);
    return;
  }
  if (source.layout == KvLayout::dense && !source.seqused) return;
  const std::vector<std::int64_t> lengths = used_lengths(lens_name, lens, capacity, random);
  if (source.layout != KvLayout::paged_csr) allocate_integers(slots.seqused, lengths);
  if (source.layout != KvLayout::dense) bind_pages(segment, lengths);
}

/// Hands out the pool's pages in order or shuffled. When the pool runs out, attention shares pages between sequences.
void Inputs::bind_pages(std::size_t segment, const std::vector<std::int64_t>& lengths) {
  const KvSource& source = segment == 0 ? problem_.kv : *problem_.kv2;
  const reference::SegmentSlots& slots = reference::segment_slots(segment);
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slots.table));
  std::vector<std::int64_t> pool(static_cast<std::size_t>(source.pages));
  std::iota(pool.begin(), pool.end(), 0);
  for (std::size_t i = pool.size(); values_.shuffled_pages && i > 1; --i) {
    std::swap(pool[i - 1], pool[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  std::vector<std::vector<std::int64_t>> pages(lengths.size());
  std::size_t taken = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    for (std::int64_t first = 0; first < lengths[b]; first += source.page_size) {
      if (pool.empty() || (taken >= pool.size() && problem_.operation == Operation::kv_append)) {
        throw Error(ErrorCode::invalid_argument, "pages", std::to_string(source.pages), "enough for the lengths");
      }
      pages[b].push_back(pool[taken++ % pool.size()]);
    }
  }
  if (source.layout == KvLayout::paged_table) {
    const std::int64_t columns = (source.seqlen + source.page_size - 1) / source.page_size;
    const Tensor& table = allocate(slots.table, DType::int32, {problem_.batch, columns});
    for (std::size_t b = 0; b < pages.size(); ++b) {
      for (std::size_t i = 0; i < pages[b].size(); ++i) {
        reference::write(table, static_cast<std::int64_t>(b) * columns + static_cast<std::int64_t>(i),
                         static_cast<double>(pages[b][i]));
      }
    }
    return;
  }
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> flat;
  std::vector<std::int64_t> last;
  for (std::size_t b = 0; b < pages.size(); ++b) {
    counts.push_back(static_cast<std::int64_t>(pages[b].size()));
    flat.insert(flat.end(), pages[b].begin(), pages[b].end());
    last.push_back(lengths[b] == 0 ? 0 : (lengths[b] - 1) % source.page_size + 1);
  }
  allocate_integers(slots.indptr, cumulative(counts));
  allocate_integers(slots.indices, flat);
  if (problem_.operation != Operation::kv_append) allocate_integers(slots.last_page_len, last);
}

void Inputs::bind_offsets() {
  const auto bind = [this](Slot slot, const char* name, const std::vector<std::int64_t>& list) {
    if (!list.empty()) allocate_integers(slot, spread(name, list, problem_.batch), DType::int64);
  };
  bind(Slot::q_offset, "q_offset", values_.q_offset);
  bind(Slot::k_offset, "k_offset", values_.k_offset);
  bind(Slot::k_offset2, "k_offset2", values_.k_offset2);
}

}  // namespace tessera::cases
