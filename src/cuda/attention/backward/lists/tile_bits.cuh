// SPDX-License-Identifier: Apache-2.0
// Walks over the tiles that a list selects for a block of the backward. A warp reads 32 words of TileBits, which are
// 1024 tiles, at a time, so that lists of any length need no shared memory.
#pragma once

#include "cuda/attention/tiles/mask.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

inline constexpr u32 kWholeWarp = 0xffffffffU;

/// Returns a word with a bit for each of the 32 tiles from `first` on, set if the tile is in `tiles`.
__device__ __forceinline__ u32 bits_between(int first, const Interval& tiles) {
  const int low = min(max(tiles.begin - first, 0), 32);
  const int count = min(max(tiles.end - first, 0), 32) - low;
  return count > 0 ? kWholeWarp >> (32 - count) << low : 0;
}

/// The tiles of a row of bits that are in one of two intervals; the second interval is behind the first.
struct ListedTiles {
  const u32* words;
  int waived_words;  // as in TileBits
  Interval first, second{0, 0};

  /// `list_head`: index of the head in the list; `own`: the tile that the block owns.
  __device__ __forceinline__ ListedTiles(const TileBits& bits, int batch, int list_head, int own, const Interval& tiles)
      : words(bits.words + batch * bits.batch_stride + list_head * bits.head_stride + own * i64{bits.row_words}),
        waived_words(bits.waived_words),
        first(tiles) {}

  __device__ __forceinline__ u32 word(int i) const {
    const u32 wanted = bits_of_word(i);
    return wanted != 0 ? words[i] & wanted : 0;
  }
  /// Returns a word of the bits of full tiles, for lists that have them.
  __device__ __forceinline__ u32 waived_word(int i) const { return bits_of_word(i) != 0 ? words[waived_words + i] : 0; }
  __device__ __forceinline__ int begin_word() const {
    return (first.begin < first.end ? first.begin : second.begin) / 32;
  }
  __device__ __forceinline__ int end_word() const { return (max(first.end, second.end) + 31) / 32; }
  /// Returns the number of tiles; a whole warp calls this.
  __device__ __forceinline__ int count(int lane) const {
    int count = 0;
    for (int i = begin_word() + lane; i < end_word(); i += 32) count += __popc(word(i));
    return __reduce_add_sync(kWholeWarp, count);
  }

 private:
  __device__ __forceinline__ u32 bits_of_word(int i) const {
    return bits_between(i * 32, first) | bits_between(i * 32, second);
  }
};

/// tile_q rows of one query head, or of the packed heads from `head` on (BwdConfig::heads_a_tile).
struct QueryTile {
  int head : 31;  // number among those that share the key head
  // With a list: the tile is full, so that the user's mask is waived. It shares a word with `head`: a QueryTile has two
  // words.
  bool waived : 1;
  int first;  // row

  QueryTile() = default;
  __device__ __forceinline__ QueryTile(int of_head, int first_row, bool is_waived = false)
      : head(of_head), waived(is_waived), first(first_row) {}
};

/// A tile of a walk.
struct WalkedTile {
  int number;
  bool waived;  // the tile is full, and the user's mask is waived
};

/// With `waives`: which tiles of the words that a walk holds are full.
template <bool waives>
struct WaivedWord {};
template <>
struct WaivedWord<true> {
  u32 waived_word = 0;
};

/// The state of a walk over the tiles of several heads, head after head. A warp walks; each of its lanes holds a word.
template <bool waives>
struct TileWalk : WaivedWord<waives> {
  int head = 0;
  int base;      // all words before it have been loaded
  u32 word = 0;  // word base − 32 + lane, without the tiles taken so far

  /// `first`: ListedTiles of head 0.
  __device__ __forceinline__ explicit TileWalk(const ListedTiles& first) : base(first.begin_word()) {}

  /// Returns the next tile; there must be one. tiles_of(head): the ListedTiles of a head.
  template <class TilesOf>
  __device__ __forceinline__ WalkedTile next(int lane, TilesOf tiles_of) {
#pragma unroll 1
    for (;;) {
      const u32 holders = __ballot_sync(kWholeWarp, word != 0);
      if (holders != 0) {
        const int holder = __ffs(static_cast<int>(holders)) - 1;
        const u32 found = __shfl_sync(kWholeWarp, word, holder);
        const int bit = __ffs(static_cast<int>(found)) - 1;
        if (lane == holder) word &= word - 1;
        bool waived = false;
        if constexpr (waives) waived = (__shfl_sync(kWholeWarp, this->waived_word, holder) >> bit & 1) != 0;
        return {(base - 32 + holder) * 32 + bit, waived};
      }
      if (base >= tiles_of(ptx::afresh(head)).end_word()) base = tiles_of(++head).begin_word();
      word = tiles_of(ptx::afresh(head)).word(base + lane);
      if constexpr (waives) this->waived_word = tiles_of(ptx::afresh(head)).waived_word(base + lane);
      base += 32;
    }
  }
};

}  // namespace tessera::cuda
