// SPDX-License-Identifier: Apache-2.0
// The work of a block of the forward: its rows, its sequence, and the tiles of keys that it walks. It is a HidingWork
// (tiles/tile_work.cuh).
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/descales.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/tiles/list_collector.cuh"
#include "cuda/attention/tiles/tile_list.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// The addresses of keys and values, for threads that copy them. TMA has tensor maps instead.
template <FwdConfig C, bool by_threads = !C.uses_tma()>
struct KvAddresses {
  KvRows<C> keys[C.segments], values[C.segments];
};
template <FwdConfig C>
struct KvAddresses<C, false> {};

/// Whether a mask or dropout may give a key of the tile weight 0 in some row.
template <FwdConfig C>
__device__ __forceinline__ bool hides(const KvTile& tile) {
  return C.dropout || (C.tests_elements() && !tile.waived) || tile.cut_begin || tile.cut_end;
}

/// The work, as each thread computes it for itself.
template <FwdConfig C>
struct BlockWork : KvAddresses<C> {
  Block block;
  Sequence sequence;
  KvTiles<C> tiles;

  /// Returns whether the block has a row. Every thread calls this, so that the first copies need no barrier; with wgmma
  /// only one lane of the producer does. `tiles` is set for Tiles::range only.
  __device__ __forceinline__ bool find(const FwdParams& p, const Block& which) {
    block = which;
    sequence = Sequence(p, block.batch, C.segments);
    if (block.first_row >= static_cast<int>(sequence.q.capacity * p.group.value)) return false;
    if constexpr (C.tiles == Tiles::range) tiles = KvTiles<C>(p, sequence, block);
    if constexpr (!C.uses_tma()) {
#pragma unroll
      for (int i = 0; i < C.segments; ++i) {
        const KvParams& kv = p.kv[i];
        const Extent extent = sequence.segment(i).extent;
        this->keys[i] = KvRows<C>(kv, kv.k, kv.k_strides, extent, block.batch, block.kv_head);
        this->values[i] = KvRows<C>(kv, kv.v, kv.v_strides, extent, block.batch, block.kv_head, bytes_of(C.v_type()));
      }
    }
    return true;
  }

  /// Whether a mask or dropout may give a key of the tile weight 0 in some row.
  __device__ __forceinline__ bool may_hide(const KvTile& tile) const { return hides<C>(tile); }

  /// Returns how many columns of a tile are keys; the columns behind them lie beyond the end of the segment.
  __device__ __forceinline__ int keys_of(const KvTile& tile) const {
    return tiles.keys(tile, sequence.segment(tile.segment).extent.length);
  }
};

/// A BlockWork in shared memory, because the products need the registers; and values that one thread computes for all.
template <FwdConfig C>
struct SharedWork : BlockWork<C> {
  DropoutDraws dropout;
  int non_finite;  // whether a value that is not finite was replaced
};

// The types from here to SharedWorks are for wgmma; warpgroups share them in shared memory.

/// Uses of the rings of keys and values, [first, end).
struct Uses {
  int first, end;
};

/// Whether the groups of 64 rows of a row tile see different tiles often enough to give each group its own range of
/// tiles (this saves 2% at S=512).
template <FwdConfig C>
inline constexpr bool kGroupsDiffer = C.warps > 4 && (C.tile_q > C.tile_kv) &&
                                      (C.tiles == Tiles::range) && C.segments == 1;

/// With a skip state: a flag of a row tile.
template <bool moves>
struct UnknownRows {};
template <>
struct UnknownRows<true> {
  int unknown;  // whether the masses of a row are unknown
};

/// For callables: whether they may compute with 32-bit positions in all segments (are_positions_small).
template <bool has_callables>
struct SmallPositions {};
template <>
struct SmallPositions<true> {
  bool positions_are_small;
};

/// A row tile's work, its number, and its uses of the rings. own: the uses of each consumer group; its rows see no keys
/// of other uses. When the copies come to drawing_use, the next row tile is drawn.
template <FwdConfig C>
struct WorkOfRings : SharedWork<C>,
                     UnknownRows<C.skip != Skip::none>,
                     Descales<C.descales_at_once()>,
                     SmallPositions<C.finds_small_positions()> {
  int item;
  int first_use, drawing_use, end_use;
  Uses own[kGroupsDiffer<C> ? C.warps / 4 : 1];
  const char* outputs;  // address of O of query 0, of the block's first head
};

/// The shared memory in front of the tiles: the current row tile and the next one, and the mbarriers of the rings.
template <FwdConfig C>
struct SharedWorks {
  WorkOfRings<C> works[2];
  int end;  // the number of row tiles, once it is known; until then -1
  u64 items[4], keys[2 * C.stages], values[2 * C.stages];
  // For values (softmax/non_finite.cuh). Consumers wait for tiles that may hide keys and release none of them; with
  // products of 8 bits they wait for all tiles and release them.
  u64 checks[2 * C.stages];
  u64 nearly_copied;                  // a phase for each row tile: its copies have come to drawing_use
  u64 queries[C.warps / 4];           // of each group: a phase for each row tile
  u64 granules_there, granules_read;  // for lists longer than their ring: a phase for each half that is refilled
};

/// With a list, behind the tiles: its rings, and the window of the list that is being collected.
template <FwdConfig C>
__device__ __forceinline__ u32* list_ring(char* memory, int ring) {
  return reinterpret_cast<u32*>(memory + C.tiles_end()) + ring * C.list_granules();
}
template <FwdConfig C>
__device__ __forceinline__ u32* list_window(char* memory) {
  return list_ring<C>(memory, C.list_rings());
}

/// With a skip state and mma.sync: what the warps have measured of the last eight tiles, in two groups of four. Warp 0
/// reduces a group after a later barrier (forward/moved_list.cuh). unknown: whether the masses of any row are unknown.
template <FwdConfig C, bool moves = C.skip != Skip::none>
struct MeasuredTiles {};
template <FwdConfig C>
struct MeasuredTiles<C, true> {
  float measured[2][C.warps][4];
  int blocks[2][4];  // key blocks; −1 for none
  int unknown;
};

/// With mma.sync: the beginning of a block's shared memory, which includes the mbarriers of the rings of keys and
/// values.
template <FwdConfig C>
struct BlockMemory : SharedWork<C>, Descales<C.descales_at_once()>, MeasuredTiles<C> {
  u64 barriers[C.uses_tma() ? 4 * C.stages : 1];
  ListPosition collected;  // how far the list's granules are collected

  /// Finds the tiles of a list and fills its ring. All threads call this after a barrier; it ends with one.
  __device__ __forceinline__ void find_list(const FwdParams& p) {
    ListPosition at = collector(p).count(this->sequence, list_ring<C>(memory(), 0));
    if constexpr (C.skip == Skip::threshold) {
      if (this->tiles.descends) return find_descending(p);
    }
    if (at.rank < this->tiles.ranks().end) collector(p).fill(at, this->tiles.ranks().begin + C.list_granules());
    if (threadIdx.x == 0) collected = at;
    __syncthreads();
  }
  /// Makes tiles i to i + ahead of a list readable; tiles before i need not stay. All threads call this after a
  /// barrier.
  __device__ __forceinline__ void collect_list(const FwdParams& p, int i, int ahead) {
    const int begin = this->tiles.ranks().begin + i * this->tiles.granules;
    ListPosition at = collected;
    if constexpr (C.skip == Skip::threshold) {
      if (this->tiles.descends) return collect_descending(p, this->tiles.ranks().end - i, ahead);
    }
    if (at.rank >= min(begin + (ahead + 1) * this->tiles.granules, this->tiles.ranks().end)) return;
    collector(p).fill(at, begin + C.list_granules());
    if (threadIdx.x == 0) collected = at;
  }
  /// A warp's memory for a second walk over a list (ReplayedWork). It lies in the memory of the tiles.
  __device__ __forceinline__ u32* list_replay(int warp) {
    return reinterpret_cast<u32*>(memory() + FwdConfig::kWorkBytes + warp * C.list_replay_bytes());
  }

 private:
  // For walks from the last tile to the first: `collected` is the lowest rank in the ring.
  __device__ __forceinline__ void find_descending(const FwdParams& p) {
    const int begin = max(this->tiles.ranks().end - C.list_granules(), 0);
    if (begin > 0) collector(p).fill_between(begin, this->tiles.ranks().end);
    if (threadIdx.x == 0) collected = {begin, 0};
    __syncthreads();
  }
  // Makes the next ranks below `end` readable; higher ones are not read any more.
  __device__ __forceinline__ void collect_descending(const FwdParams& p, int end, int ahead) {
    const int lowest = collected.rank;
    if (lowest <= max(end - 1 - ahead, 0)) return;
    const int begin = max(end - C.list_granules(), 0);
    collector(p).fill_between(begin, lowest);
    if (threadIdx.x == 0) collected.rank = begin;
  }
  __device__ __forceinline__ char* memory() { return reinterpret_cast<char*>(this); }
  __device__ __forceinline__ auto collector(const FwdParams& p) {
    return ListCollector<C, C.threads()>{p, this->block, this->tiles, list_window<C>(memory())};
  }
};

}  // namespace tessera::cuda
