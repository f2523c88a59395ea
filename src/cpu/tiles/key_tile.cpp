// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/key_tile.h"
#include "cpu/tiles/visible_keys.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace tessera::cpu {

KeyTile KeyTile::place(Arena& arena, std::int64_t tile_kv, const Problem& problem, bool dots) {
  KeyTile tile;
  tile.spans = arena.take<Span>(tile_kv + 1);
  tile.position = arena.take<std::int64_t>(tile_kv);
  if (dots) {
    tile.dots = DotKeys::place(arena, tile_kv, problem);
  } else {
    tile.k = arena.take<float>(tile_kv * padded(problem.head_dim_qk));
    tile.v = arena.take<float>(tile_kv * padded(problem.head_dim_v));
  }
  tile.loaded = arena.take<bool>(tile_kv);
  return tile;
}

std::int64_t KeyTile::next_row(bool there, std::int64_t first, std::int64_t end) const {
  const void* at = std::memchr(loaded + first, there ? 1 : 0, static_cast<std::size_t>(end - first));
  return at == nullptr ? end : static_cast<const bool*>(at) - loaded;
}

void KeyTiles::add(const QueryTile& queries, int segment, const Segment& keys, std::int64_t base, std::int64_t first,
                   std::int64_t end, KeyTile& tile) const {
  // Positions visible to the first row are the lowest, to the last row the highest: both limits grow with the position.
  const std::int64_t low = visible_keys(problem_, queries.first_position).low;
  const std::int64_t high = visible_keys(problem_, queries.last_position).high;
  if (low > keys.position) first = std::max(first, low - keys.position);
  if (high < keys.position + end - 1) end = high - keys.position + 1;
  while (first < end) {
    std::int64_t block = 0;
    std::int64_t last = end;
    bool asks_mask = scores_.has_mask();
    if (by_block_) {
      const std::int64_t offset = segment == 0 ? 0 : problem_.key_blocks_first();
      block = first / problem_.block_kv + offset;
      if (list_.active()) {
        const std::int64_t listed = list_.next(queries.batch, queries.head, queries.query_block, block,
                                               (end - 1) / problem_.block_kv + offset + 1);
        if (listed != block) {
          first = (listed - offset) * problem_.block_kv;
          continue;
        }
        asks_mask = asks_mask && list_.at(queries.batch, queries.head, queries.query_block, block) != TileClass::full;
      }
      last = std::min(end, (block - offset + 1) * problem_.block_kv);
    }
    const std::int64_t position = keys.position + first;
    TileClass mask = TileClass::full;
    if (asks_mask) {
      mask = scores_.classify(queries.batch, queries.head, queries.first_position, queries.last_position + 1, position,
                              position + last - first);
    }
    if (mask != TileClass::none) {
      tile.spans[tile.span_count++] = {
          segment, first, last - first, base + first, position, block, mask == TileClass::partial};
    }
    first = last;
  }
}

void KeyTiles::begin(std::int64_t index, KeyTile& tile) const {
  tile.index = index;
  std::fill_n(tile.loaded, tile_kv_, false);
  if (tile.dots.rows > 0) tile.dots.begin();
}

bool KeyTiles::collect(const Sequence& sequence, const QueryTile& queries, KeyTile& tile) const {
  tile.span_count = 0;
  const std::int64_t begin = tile.index * tile_kv_;
  const std::int64_t end = std::min(begin + tile_kv_, sequence.keys());
  const std::int64_t border = sequence.segments[0].length;
  if (begin < border) add(queries, 0, sequence.segments[0], -begin, begin, std::min(end, border), tile);
  if (end > border) {
    add(queries, 1, sequence.segments[1], border - begin, std::max(begin, border) - border, end - border, tile);
  }
  return tile.span_count > 0;
}

std::int64_t KeyTiles::skip(const Sequence& sequence, const QueryTile& queries, std::int64_t from,
                            std::int64_t end) const {
  const Segment& first = sequence.segments[0];
  // With one segment, tiles before the window or the chunk are skipped.
  if (!problem_.kv2 && (problem_.window.left || problem_.chunk > 0)) {
    const std::int64_t low = visible_keys(problem_, queries.first_position).low - first.position;
    if (low > 0) from = std::max(from, std::min(end, low / tile_kv_));
  }
  if (!problem_.kv2 && has_window(problem_)) {                                     // and tiles behind it
    const std::int64_t high = visible_keys(problem_, queries.last_position).high;  // may be the largest number
    if (high < first.position + from * tile_kv_) return end;
  }
  if (!problem_.kv2 && list_.active() && from < end) {
    const std::int64_t block = from * tile_kv_ / problem_.block_kv;
    const std::int64_t blocks = problem_.key_blocks_first();
    const std::int64_t listed = list_.next(queries.batch, queries.head, queries.query_block, block, blocks);
    if (listed > block) from = std::max(from, std::min(end, listed * problem_.block_kv / tile_kv_));
  }
  return from;
}

void KeyTiles::dequantise(const Kernels& kernels, const Sequence& sequence, const Segment& source, std::int64_t kv_head,
                          std::int64_t first, std::int64_t count, float* k, float* v) const {
  if (source.k_descale.base != nullptr) {
    const float* mean = sequence.k_mean == nullptr ? nullptr : sequence.k_mean + kv_head * sequence.k_mean_head;
    dequantise_keys(kernels, source.k_descale, mean, problem_.head_dim_qk, first, count, kv_head, k);
  }
  if (source.v_descale.base != nullptr) {
    dequantise_keys(kernels, source.v_descale, nullptr, problem_.head_dim_v, first, count, kv_head, v);
  }
}

void KeyTiles::load(const Kernels& kernels, const Sequence& sequence, std::int64_t kv_head, KeyTile& tile) const {
  const std::int64_t d = padded(problem_.head_dim_qk);
  const std::int64_t dv = padded(problem_.head_dim_v);
  for (std::int64_t s = 0; s < tile.span_count; ++s) {
    const Span& span = tile.spans[s];
    const Segment& source = sequence.segments[static_cast<std::size_t>(span.segment)];
    const std::int64_t end = span.row + span.count;
    // Loads runs of rows that are not loaded yet; mostly there are none.
    for (std::int64_t row = tile.next_row(false, span.row, end), past = 0; row < end;
         row = tile.next_row(false, past, end)) {
      past = tile.next_row(true, row, end);
      const std::int64_t count = past - row;
      const std::int64_t first = span.first + row - span.row;
      std::fill_n(tile.loaded + row, count, true);
      std::iota(tile.position + row, tile.position + past, span.position + row - span.row);
      if (tile.dots.rows > 0) {
        tile.dots.load(source, problem_, first, count, kv_head, row);
        continue;
      }
      load_keys(kernels, source.k, problem_.k_type, problem_.head_dim_qk, first, count, kv_head, tile.k + row * d);
      load_keys(kernels, source.v, problem_.v_type, problem_.head_dim_v, first, count, kv_head, tile.v + row * dv);
      dequantise(kernels, sequence, source, kv_head, first, count, tile.k + row * d, tile.v + row * dv);
    }
  }
  if (tile.dots.rows > 0) tile.dots.transpose_values(kernels);
}

}  // namespace tessera::cpu
