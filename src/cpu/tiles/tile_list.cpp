// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/tile_list.h"

#include <algorithm>
#include <bit>

namespace tessera::cpu {
namespace {

// Sorted indices of one row of a list; the last dimension is contiguous.
struct Row {
  const std::int32_t* begin;
  const std::int32_t* end;
};

Row row_of(const Tensor& counts, const Tensor& indices, std::int64_t b, std::int64_t h, std::int64_t row) {
  const std::int32_t count =
      counts.as<std::int32_t>()[b * counts.strides[0] + h * counts.strides[1] + row * counts.strides[2]];
  const std::int32_t* begin =
      indices.as<std::int32_t>() + b * indices.strides[0] + h * indices.strides[1] + row * indices.strides[2];
  return {begin, begin + count};
}

}  // namespace

TileListReader::TileListReader(const Problem& problem, const Bindings& bindings, bool backward) {
  const TileList& list = backward ? problem.bwd_list : problem.list;
  form_ = list.form;
  per_batch_ = list.per_batch;
  has_full_ = list.full;
  switch (list.heads) {
    case TileList::Heads::one:
      heads_divisor_ = std::max<std::int64_t>(problem.heads_q, 1);
      break;
    case TileList::Heads::kv:
      heads_divisor_ = problem.group();
      break;
    case TileList::Heads::q:
      break;
  }
  if (backward) {
    partial_ = {bindings[Slot::bwd_tile_counts], bindings[Slot::bwd_tile_indices], bindings[Slot::bwd_tile_bits]};
    full_ = {bindings[Slot::bwd_full_counts], bindings[Slot::bwd_full_indices], bindings[Slot::bwd_full_bits]};
  } else {
    partial_ = {bindings[Slot::tile_counts], bindings[Slot::tile_indices], bindings[Slot::tile_bits]};
    full_ = {bindings[Slot::full_counts], bindings[Slot::full_indices], bindings[Slot::full_bits]};
  }
  if (!problem.skip) return;
  must_do_ = bindings[Slot::must_do_bits].as<const std::uint32_t>();
  must_skip_ = bindings[Slot::must_skip_bits].as<const std::uint32_t>();
}

bool TileListReader::contains(const Entries& entries, std::int64_t b, std::int64_t h, std::int64_t query_block,
                              std::int64_t key_block) const {
  if (form_ == TileList::Form::bitmask) {
    const Tensor& bits = entries.bits;
    const std::uint32_t* words =
        bits.as<std::uint32_t>() + b * bits.strides[0] + h * bits.strides[1] + query_block * bits.strides[2];
    return (word(words, key_block / 32) >> (key_block % 32) & 1U) != 0;
  }
  const bool transposed = form_ == TileList::Form::transposed;
  const Row row = row_of(entries.counts, entries.indices, b, h, transposed ? key_block : query_block);
  return std::binary_search(row.begin, row.end, static_cast<std::int32_t>(transposed ? query_block : key_block));
}

std::int64_t TileListReader::next_in(const Entries& entries, std::int64_t b, std::int64_t h, std::int64_t query_block,
                                     std::int64_t from, std::int64_t end) const {
  if (form_ == TileList::Form::indices) {
    const Row row = row_of(entries.counts, entries.indices, b, h, query_block);
    const std::int32_t* found = std::lower_bound(row.begin, row.end, static_cast<std::int32_t>(from));
    return found == row.end ? end : std::min<std::int64_t>(*found, end);
  }
  if (form_ == TileList::Form::transposed) {
    while (from < end && !contains(entries, b, h, query_block, from)) ++from;
    return from;
  }
  const Tensor& bits = entries.bits;
  const std::uint32_t* words =
      bits.as<std::uint32_t>() + b * bits.strides[0] + h * bits.strides[1] + query_block * bits.strides[2];
  while (from < end) {
    const std::uint32_t rest = word(words, from / 32) >> (from % 32);
    if (rest != 0) return std::min<std::int64_t>(from + std::countr_zero(rest), end);
    from = (from / 32 + 1) * 32;
  }
  return end;
}

TileClass TileListReader::at(std::int64_t batch, std::int64_t head, std::int64_t query_block,
                             std::int64_t key_block) const {
  const std::int64_t b = per_batch_ ? batch : 0;
  const std::int64_t h = list_head(head);
  if (has_full_ && contains(full_, b, h, query_block, key_block)) return TileClass::full;
  return contains(partial_, b, h, query_block, key_block) ? TileClass::partial : TileClass::none;
}

std::int64_t TileListReader::next(std::int64_t batch, std::int64_t head, std::int64_t query_block, std::int64_t from,
                                  std::int64_t end) const {
  const std::int64_t b = per_batch_ ? batch : 0;
  const std::int64_t h = list_head(head);
  const std::int64_t partial = next_in(partial_, b, h, query_block, from, end);
  return has_full_ ? std::min(partial, next_in(full_, b, h, query_block, from, end)) : partial;
}

}  // namespace tessera::cpu
