// SPDX-License-Identifier: Apache-2.0
// The tiles of keys of a tile list, as a block walks them. If the list's blocks are smaller than a kernel's tile, the
// tile gathers several granules of C.granule keys. The granules lie in order in a ring in shared memory, whose size
// does not depend on the list; tiles/list_collector.cuh counts them and fills the ring.
#pragma once

#include "cuda/attention/tiles/tile_range.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// What an entry of the ring holds: the first key of a granule, and whether the list waives the user's mask there.
inline constexpr int kNowhere = 1 << 30;  // pads a segment's last tile: it is behind all keys
inline constexpr u32 kWaived = u32{1} << 31;

/// What lists require of a configuration, with the names of FwdConfig.
template <class Config>
concept ListConfig = WalkConfig<Config> && requires(const Config& c) {
  int{c.granule};
  int{c.list_granules()};
  bool{c.list_waives};
  bool{c.trusts};
};

/// What the rows of a tile see of a segment.
struct ListPart {
  Interval granules{0, 0};  // that some row sees
  Interval full{0, 0};      // keys that every row sees
};

/// The rule that advances the list to the next step; only forwards have one.
template <class Config>
constexpr Skip skip_of(const Config& c) {
  if constexpr (requires { Skip{c.skip}; }) return c.skip;
  return Skip::none;
}

/// Whether the tiles are walked from the last to the first, for lists for which that is decided at run time.
template <bool at_run_time>
struct WalkDirection {
  static constexpr bool descends = false;
};
template <>
struct WalkDirection<true> {
  bool descends = false;
};

/// Ranks number the granules of a row tile, including those that pad the last tile of a segment. Rank r is in entry r %
/// entries of the ring; `entries` is a power of two.
template <ListConfig auto C, int entries = C.list_granules()>
class TileList : public WalkDirection<skip_of(C) == Skip::threshold> {
 public:
  static constexpr int granules = C.tile_kv / C.granule;  // of a tile
  static_assert(entries % granules == 0 && (entries & (entries - 1)) == 0);

  TileList() = default;
  /// The same tiles, with another ring, from the first to the last.
  template <int size>
  __device__ __forceinline__ TileList(const TileList<C, size>& other, u32* ring)
      : ring_(ring),
        first_(other.first_),
        second_(other.second_),
        query_blocks_(other.query_blocks_),
        first_tiles_(other.first_tiles_),
        first_tile_(other.first_tile_),
        count_(other.count_) {}

  __device__ __forceinline__ int count() const { return count_; }

  /// Tile i in the order of the walk. Its granules must be in the ring.
  __device__ __forceinline__ KvTile at(int i) const {
    int index = first_tile_ + i;
    if constexpr (skip_of(C) == Skip::threshold) {
      if (this->descends) index = first_tile_ + count_ - 1 - i;
    }
    const int segment = C.segments == 1 || index < first_tiles_ ? 0 : 1;
    const Interval full = segment == 0 ? first_.full : second_.full;
    const int entry = index * granules & (entries - 1);
    const int first = first_key(entry);
    const int last = granules == 1 ? first : first_key(entry + granules - 1);
    const bool waived = granules == 1 && C.list_waives && (ring_[entry] & kWaived) != 0;
    return {segment, first, first<full.begin, last + C.granule> full.end, waived, entry};
  }

  /// Key of a column of a tile; columns of padding have keys beyond every sequence.
  __device__ __forceinline__ int key(const KvTile& tile, int column) const {
    if constexpr (granules == 1) return tile.first + column;
    return first_key(tile.entry + column / C.granule) + column % C.granule;
  }
  /// How many columns of a tile are keys of a segment of `length`. These come first, because a tile's granules ascend.
  __device__ __forceinline__ int keys(const KvTile& tile, int length) const {
    int count = 0;
#pragma unroll 1
    for (int column = 0; column < C.tile_kv; column += C.granule) {
      count += min(max(length - key(tile, column), 0), C.granule);
    }
    return count;
  }
  __device__ __forceinline__ int moved(const KvTile& tile, int column) const {
    return granules == 1 ? 0 : key(tile, column) - column - tile.first;
  }
  /// Whether the list waives the user's mask for a column.
  __device__ __forceinline__ bool waives(const KvTile& tile, int column) const {
    return C.list_waives && (ring_[tile.entry + column / C.granule] & kWaived) != 0;
  }

  /// Whether the row tile sees these granules of a segment; then it walks them if they are listed.
  __device__ __forceinline__ bool sees(int segment, const Interval& granules_of_block) const {
    return max(granules_of_block.begin, seen(segment).begin) < min(granules_of_block.end, seen(segment).end);
  }

  /// Ranks of the tiles of the block's split.
  __device__ __forceinline__ Interval ranks() const {
    return {first_tile_ * granules, (first_tile_ + count_) * granules};
  }

 private:
  template <ListConfig auto D, int collectors, int size>
  friend struct ListCollector;
  template <ListConfig auto D, int size>
  friend class TileList;

  __device__ __forceinline__ Interval seen(int segment) const {
    return C.segments == 1 || segment == 0 ? first_.granules : second_.granules;
  }
  __device__ __forceinline__ int first_key(int entry) const {
    return static_cast<int>(C.list_waives ? ring_[entry] & ~kWaived : ring_[entry]);
  }

  u32* ring_ = nullptr;
  ListPart first_;
  ListPart second_;
  Interval query_blocks_{0, 0};  // of the rows
  int first_tiles_ = 0;          // of the first segment, in all splits
  int first_tile_ = 0;           // of the block's split
  int count_ = 0;
};

template <WalkConfig auto C, bool listed = C.tiles == Tiles::list>
struct KvTilesOf {
  using type = TileRange<C>;
};
template <WalkConfig auto C>
struct KvTilesOf<C, true> {
  using type = TileList<C>;
};
/// The tiles that a configuration walks.
template <WalkConfig auto C>
using KvTiles = typename KvTilesOf<C>::type;

}  // namespace tessera::cuda
