// SPDX-License-Identifier: Apache-2.0
// Walks over the tiles that a list leaves to a block of the backward: bits in memory (TileBits), of which a warp reads
// 32 words, 1024 tiles, at a time. So lists of any length need no shared memory.
#pragma once

#include "cuda/attention/tiles/mask.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

inline constexpr u32 kWholeWarp = 0xffffffffU;

/// A one for each of the 32 tiles from `first` on that lies in an interval.
__device__ __forceinline__ u32 bits_between(int first, const Interval& tiles) {
  const int low = min(max(tiles.begin - first, 0), 32);
  const int count = min(max(tiles.end - first, 0), 32) - low;
  return count > 0 ? kWholeWarp >> (32 - count) << low : 0;
}

/// Of a row of bits the tiles in either of two intervals, of which the second lies behind the first.
struct ListedTiles {
  const u32* words;
  int waived_words;  // as TileBits'
  Interval first, second{0, 0};

  /// `list_head`: as the list tells heads apart; `own`: tile of the block.
  __device__ __forceinline__ ListedTiles(const TileBits& bits, int batch, int list_head, int own, const Interval& tiles)
      : words(bits.words + batch * bits.batch_stride + list_head * bits.head_stride + own * i64{bits.row_words}),
        waived_words(bits.waived_words),
        first(tiles) {}

  __device__ __forceinline__ u32 word(int i) const {
    const u32 wanted = bits_of_word(i);
    return wanted != 0 ? words[i] & wanted : 0;
  }
  /// A word of the bits of full tiles, of a list whose bits tell them apart.
  __device__ __forceinline__ u32 waived_word(int i) const { return bits_of_word(i) != 0 ? words[waived_words + i] : 0; }
  __device__ __forceinline__ int begin_word() const {
    return (first.begin < first.end ? first.begin : second.begin) / 32;
  }
  __device__ __forceinline__ int end_word() const { return (max(first.end, second.end) + 31) / 32; }
  /// How many there are, by a warp.
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

/// tile_q rows of one query head, or of as many from `head` on as are packed (BwdConfig::heads_a_tile).
struct QueryTile {
  int head : 31;  // of those that share the key head
  // Of a list: the user's mask is waived in all of the tile. A bit of the head's number, so that a tile is two words.
  bool waived : 1;
  int first;  // row

  QueryTile() = default;
  __device__ __forceinline__ QueryTile(int of_head, int first_row, bool is_waived = false)
      : head(of_head), waived(is_waived), first(first_row) {}
};

/// A tile that a walk has come to.
struct WalkedTile {
  int number;
  bool waived;  // the user's mask is waived in all of it
};

/// Which tiles of the words that a walk holds are full, of walks that tell.
template <bool waives>
struct WaivedWord {};
template <>
struct WaivedWord<true> {
  u32 waived_word = 0;
};

/// Where a walk is that takes the tiles of several heads, head after head. By a warp, whose lanes hold a word each.
template <bool waives>
struct TileWalk : WaivedWord<waives> {
  int head = 0;
  int base;      // words before it lie behind, but for those held
  u32 word = 0;  // of base − 32 + lane: what is not taken yet

  /// `first`: ListedTiles of head 0.
  __device__ __forceinline__ explicit TileWalk(const ListedTiles& first) : base(first.begin_word()) {}

  /// The next tile, which there must be. `tiles_of(head)`: its ListedTiles.
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
