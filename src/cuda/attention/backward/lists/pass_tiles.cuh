// SPDX-License-Identifier: Apache-2.0
// The tiles that a list selects for a block of either pass. Without a list a walk has no state: its i-th tile follows
// from i.
#pragma once

#include "cuda/attention/backward/lists/tile_bits.cuh"
#include "cuda/attention/tiles/tile_range.cuh"

namespace tessera::cuda {

/// For the key pass, whose Work is a KeyWork: the tiles of rows of the query heads that share the block's key head.
template <BwdConfig B, class Work>
struct ListedRowTiles {
  const BwdParams& params;
  const Work& work;

  __device__ __forceinline__ ListedTiles of_head(int head) const {
    const bool by_query_head = params.forward.list.heads == ListHeads::q;
    const int own = work.first_key / B.tile_kv + (B.segments == 2 && work.segment == 1 ? params.first_tiles : 0);
    // This is computed again when a walk needs it, because values that are kept take registers.
    const int first_tile = ptx::afresh(work.first_tile);
    return ListedTiles(params.tile_bits[1], work.batch, by_query_head ? work.first_head + head : work.kv_head, own,
                       {first_tile, first_tile + work.tiles});
  }
  /// Returns the number of tiles, of all heads. Every thread of a warp calls this.
  __device__ __forceinline__ int count(int lane) const {
    const int heads = walks();
    if (params.forward.list.heads != ListHeads::q) return heads * of_head(0).count(lane);
    int count = 0;
    for (int head = 0; head < heads; ++head) count += of_head(head).count(lane);
    return count;
  }
  /// Returns the tiles of a part of the block's tile of keys. Parts have equally many listed tiles, up to whole words
  /// of bits. Every thread of a warp calls this.
  __device__ __forceinline__ Interval of_part(const KeyPart& part, int lane) const {
    const i64 all = count(lane);
    const ListedTiles tiles = of_head(0);
    const int begin = part.part == 0 ? tiles.begin_word() : word_behind(all * part.part / part.parts, lane);
    const int end =
        part.part + 1 == part.parts ? tiles.end_word() : word_behind(all * (part.part + 1) / part.parts, lane);
    const int first = max(begin * 32, work.first_tile);
    return {first, max(min(end * 32, work.first_tile + work.tiles), first)};
  }
  using Walk = TileWalk<B.list_waives>;
  __device__ __forceinline__ Walk walk() const { return Walk(of_head(0)); }
  __device__ __forceinline__ QueryTile next(Walk& walk, int lane) const {
    const WalkedTile tile = walk.next(lane, [&](int head) { return of_head(head); });
    return {walk.head * B.heads_a_tile, tile.number * B.tile_q, tile.waived};
  }

 private:
  /// How often a block goes over its tiles: once for each heads_a_tile query heads.
  __device__ __forceinline__ int walks() const {
    return static_cast<int>(params.forward.heads_a_kv.value) / B.heads_a_tile;
  }
  /// Returns the first word before which there are `tiles` tiles or more, of all heads.
  __device__ __forceinline__ int word_behind(i64 tiles, int lane) const {
    const int heads = walks();
    const bool by_query_head = params.forward.list.heads == ListHeads::q;
    const int end = of_head(0).end_word();
    i64 before = 0;
#pragma unroll 1
    for (int base = of_head(0).begin_word(); base < end; base += 32) {
      int sum = 0;  // tiles in the lane's word and the words before it
      for (int head = 0; head < (by_query_head ? heads : 1); ++head) sum += __popc(of_head(head).word(base + lane));
      if (!by_query_head) sum *= heads;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(kWholeWarp, sum, distance);
        if (lane >= distance) sum += other;
      }
      const u32 reached = __ballot_sync(kWholeWarp, before + sum >= tiles);
      if (reached != 0) return min(base + __ffs(static_cast<int>(reached)), end);
      before += __shfl_sync(kWholeWarp, sum, 31);
    }
    return end;
  }
};

/// For the row pass, whose Work is a BlockWork: the tiles of keys of both sources.
template <BwdConfig B, class Work>
struct ListedKeyTiles {
  const BwdParams& params;
  const Work& work;

  __device__ __forceinline__ ListedTiles tiles() const {
    const TileBits& bits = params.tile_bits[0];
    const Block& block = work.block;
    const int head = params.forward.list.heads == ListHeads::q ? block.head : block.kv_head;
    ListedTiles tiles(bits, block.batch, head, block.first_row / B.tile_q, work.tiles.numbers(0));
    if constexpr (B.segments == 2) {
      const Interval second = work.tiles.numbers(1);
      tiles.second = {bits.first_tiles + second.begin, bits.first_tiles + second.end};
    }
    return tiles;
  }
  /// Returns the number of tiles. Every thread of a warp calls this.
  __device__ __forceinline__ int count(int lane) const { return tiles().count(lane); }
  using Walk = TileWalk<B.list_waives>;
  __device__ __forceinline__ Walk walk() const { return Walk(tiles()); }
  __device__ __forceinline__ KvTile next(Walk& walk, int lane) const {
    const WalkedTile next = walk.next(lane, [&](int /*head*/) { return tiles(); });
    const int first_tiles = params.tile_bits[0].first_tiles;
    const bool second = B.segments == 2 && next.number >= first_tiles;
    KvTile tile = work.tiles.numbered(second ? 1 : 0, second ? next.number - first_tiles : next.number);
    tile.waived = next.waived;
    return tile;
  }
};

/// The number of tiles that a list selects for a block; only blocks with a list store it.
template <bool has_list>
struct ListedCount {
  static constexpr int listed = 0;
};
template <>
struct ListedCount<true> {
  int listed;
};

/// A walk without a list has no state.
struct NoWalk {};
template <bool has_list, bool waives>
struct WalkOf {
  using type = NoWalk;
  using Passed = NoWalk;  // a reference would change code that has no walk
};
template <bool waives>
struct WalkOf<true, waives> {
  using type = TileWalk<waives>;
  using Passed = TileWalk<waives>&;
};
template <BwdConfig B>
using BwdWalk = typename WalkOf<B.has_list(), B.list_waives>::type;
template <BwdConfig B>
using PassedWalk = typename WalkOf<B.has_list(), B.list_waives>::Passed;

/// `listed`: ListedRowTiles or ListedKeyTiles.
template <BwdConfig B, class Listed>
__device__ __forceinline__ BwdWalk<B> begin_walk(const Listed& listed) {
  if constexpr (B.has_list()) {
    return listed.walk();
  } else {
    return {};
  }
}

/// The size of the ring of listed tiles, if all threads of a block walk: it has the tiles in flight, and one that some
/// threads still compute.
inline constexpr int kListedAhead = 4;

}  // namespace tessera::cuda
