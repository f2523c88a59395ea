// SPDX-License-Identifier: Apache-2.0
// A contiguous range of tiles of keys: from the first key that some row of the block sees to the last.
#pragma once

#include "cuda/attention/tiles/mask.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_schedule.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// What walks over tiles of keys require of a configuration.
template <class Config>
concept WalkConfig = RowTileConfig<Config> && MaskConfig<Config> && requires(const Config& c) {
  int{c.tile_kv};
  int{c.segments};
};

/// The least number of tiles of a split of a short sequence; 0: all splits share the tiles.
template <WalkConfig auto C>
constexpr int least_share() {
  if constexpr (requires { C.least_share(); }) return C.least_share();
  return 0;
}

/// tile_kv keys of a segment. They begin at `first`, unless the tile gathers several granules of a list.
struct KvTile {
  int segment;
  int first;
  bool cut_begin, cut_end;  // some row of the block does not see the first, the last key
  bool waived = false;      // the list waives the user's mask in the whole tile; not set if the tile gathers granules
  int entry = 0;            // with a forward's list, the ring's entry of the first granule
};

/// The tiles of `size` that cover what consecutive lines see: the keys that queries see, or the queries that see keys.
template <int size>
struct TileSpan {
  int begin = 0;  // tile
  int count = 0;
  Interval full{0, 0};  // what all the lines see; a tile that reaches beyond it is cut

  TileSpan() = default;
  /// `bounds`: KeysOfQueries or QueriesOfKeys. Their intervals move monotonically, so that those of the first and the
  /// last line are enough.
  template <class Bounds>
  __device__ __forceinline__ TileSpan(const Bounds& bounds, int first_line, int last_line) {
    const Interval first = bounds.of(first_line);
    const Interval last = bounds.of(last_line);
    full = {last.begin, first.end};
    if (first.begin >= last.end) return;
    begin = first.begin / size;
    count = divide_up(last.end, size) - begin;
  }

  __device__ __forceinline__ int first(int index) const { return (begin + index) * size; }
};

/// The tiles of both segments, from the last to the first, so that the masked ones at the end come first.
template <WalkConfig auto C>
class TileRange {
 public:
  TileRange() = default;
  __device__ __forceinline__ TileRange(const AttentionParams& p, const Sequence& sequence, const Block& block) {
    const int rows = static_cast<int>(sequence.q.length * p.group.value);
    if (block.first_row >= rows) return;
    const int first_query = PackedRow(block.first_row, p.group).query;
    const int last_query = PackedRow(min(block.first_row + C.tile_q, rows) - 1, p.group).query;
    first_ = Span(KeysOfQueries<C>(p, sequence, sequence.first, first_query), first_query, last_query);
    if constexpr (C.segments == 2) {
      second_ = Span(KeysOfQueries<C>(p, sequence, sequence.second, first_query), first_query, last_query);
    }
    share_out(p, block, first_.count + second_.count);
  }

  __device__ __forceinline__ int count() const { return count_; }

  /// Key of a column of a tile.
  __device__ __forceinline__ int key(const KvTile& tile, int column) const { return tile.first + column; }
  /// Columns of a tile that are keys of a segment of `length`.
  __device__ __forceinline__ int keys(const KvTile& tile, int length) const {
    return min(length - tile.first, C.tile_kv);
  }
  /// How far the key of a column is from where it would be in a contiguous tile.
  __device__ __forceinline__ int moved(const KvTile& /*tile*/, int /*column*/) const { return 0; }
  __device__ __forceinline__ bool waives(const KvTile& tile, int /*column*/) const { return tile.waived; }

  /// The numbers of a segment's tiles, counted from its key 0, and the tile of a number: for walks that skip tiles.
  __device__ __forceinline__ Interval numbers(int segment) const {
    const int begin = segment == 0 ? first_.begin : second_.begin;
    return {begin, begin + (segment == 0 ? first_.count : second_.count)};
  }
  __device__ __forceinline__ KvTile numbered(int segment, int number) const {
    if (C.segments == 1 || segment == 0) return tile_of(first_, number - first_.begin, 0);
    return tile_of(second_, number - second_.begin, 1);
  }

  /// Tile i in the order of the walk.
  __device__ __forceinline__ KvTile at(int i) const {
    const int index = last_ - i;
    if (C.segments == 1 || index < first_.count) return tile_of(first_, index, 0);
    return tile_of(second_, index - first_.count, 1);
  }

 private:
  using Span = TileSpan<C.tile_kv>;

  static __device__ __forceinline__ KvTile tile_of(const Span& span, int index, int segment) {
    const int key = span.first(index);
    return {segment, key, key<span.full.begin, key + C.tile_kv> span.full.end};
  }

  // Divides `total` tiles among the splits; the first ones have one more.
  __device__ __forceinline__ void share_out(const AttentionParams& p, const Block& block, int total) {
    int share = 0;
    int longer = 0;  // splits that have one tile more
    if constexpr (least_share<C>() > 0) {
      const int parts = parts_of(p, total);
      if (block.split >= parts) return;
      share = total / parts;
      longer = total - share * parts;
    } else {
      share = ptx::divide(total, p.splits);
      longer = total - share * static_cast<int>(p.splits.value);
    }
    count_ = share + (block.split < longer ? 1 : 0);
    last_ = block.split * share + min(block.split, longer) + count_ - 1;
  }
  // The number of splits that have tiles. It is smaller for short sequences, so that each of these has at least as many
  // tiles as a split of the longest sequence, or least_share() if that is less.
  static __device__ __forceinline__ int parts_of(const AttentionParams& p, int total) {
    i64 keys = i64{p.kv[0].capacity} + (C.segments == 2 ? p.kv[1].capacity : 0);
    keys = min(keys, max(i64{to_int(p.window_left)} + to_int(p.window_right) + p.seqlen_q, i64{1}));
    const int capacity = divide_up(to_int(keys), C.tile_kv);
    const int least = clamp(ptx::divide(capacity, p.splits), 1, least_share<C>());
    return clamp(total / least, 1, static_cast<int>(p.splits.value));
  }

  Span first_;
  Span second_;
  int count_ = 0;
  int last_ = -1;
};

}  // namespace tessera::cuda
