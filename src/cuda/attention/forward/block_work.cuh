// SPDX-License-Identifier: Apache-2.0
// What a block of the forward has to do: its rows, its sequence, the tiles that it walks and where they lie. It is a
// HidingWork (tiles/tile_work.cuh).
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/descales.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/tiles/list_collector.cuh"
#include "cuda/attention/tiles/tile_list.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// Where keys and values lie, for threads that copy them; TMA is told no addresses.
template <FwdConfig C, bool by_threads = !C.uses_tma()>
struct KvAddresses {
  KvRows<C> keys[C.segments], values[C.segments];
};
template <FwdConfig C>
struct KvAddresses<C, false> {};

/// Whether any key of a tile may weigh 0 for a row.
template <FwdConfig C>
__device__ __forceinline__ bool hides(const KvTile& tile) {
  return C.dropout || (C.tests_elements() && !tile.waived) || tile.cut_begin || tile.cut_end;
}

/// What every thread finds out for itself.
template <FwdConfig C>
struct BlockWork : KvAddresses<C> {
  Block block;
  Sequence sequence;
  KvTiles<C> tiles;

  /// By every thread, so that the first copies wait for nobody; `tiles` of ranges only. Whether there is a row.
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

  /// Whether any key of the tile may weigh 0 for a row.
  __device__ __forceinline__ bool may_hide(const KvTile& tile) const { return hides<C>(tile); }

  /// Columns of a tile that are keys; those behind them lie beyond the end of the segment.
  __device__ __forceinline__ int keys_of(const KvTile& tile) const {
    return tiles.keys(tile, sequence.segment(tile.segment).extent.length);
  }
};

/// A BlockWork in shared memory, because the products need the registers; and what one thread computes for all.
template <FwdConfig C>
struct SharedWork : BlockWork<C> {
  DropoutDraws dropout;
  int non_finite;  // whether a value that is not finite was replaced
};

// By wgmma, what warpgroups tell each other.

/// Uses of the rings of keys and values, [first, end).
struct Uses {
  int first, end;
};

/// Whether groups of 64 rows see different tiles, often enough to be worth the asking (2% of S=512).
template <FwdConfig C>
inline constexpr bool kGroupsDiffer = C.warps > 4 && (C.tile_q > C.tile_kv) &&
                                      (C.tiles == Tiles::range) && C.segments == 1;

/// Of a row tile whose list moves on.
template <bool moves>
struct UnknownRows {};
template <>
struct UnknownRows<true> {
  int unknown;  // whether the masses of a row are
};

/// Of callables: whether they may compute with positions of 32 bits (are_positions_small), of all segments.
template <bool has_callables>
struct SmallPositions {};
template <>
struct SmallPositions<true> {
  bool positions_are_small;
};

/// A row tile's work, its number, and its uses of the rings; those of each group that computes: its rows see nothing of
/// the others. With drawing_use the next row tile is drawn.
template <FwdConfig C>
struct WorkOfRings : SharedWork<C>,
                     UnknownRows<C.skip != Skip::none>,
                     Descales<C.descales_at_once()>,
                     SmallPositions<C.finds_small_positions()> {
  int item;
  int first_use, drawing_use, end_use;
  Uses own[kGroupsDiffer<C> ? C.warps / 4 : 1];
  const char* outputs;  // of the block's first head: O of query 0
};

/// In front of the tiles: the row tile in work and the next, and the barriers of rings.
template <FwdConfig C>
struct SharedWorks {
  WorkOfRings<C> works[2];
  int end;  // the number behind that of the last row tile, once it is known; until then -1
  u64 items[4], keys[2 * C.stages], values[2 * C.stages];
  u64 checks[2 *
             C.stages];  // of values: see softmax/non_finite.cuh; who computes waits only for some, and releases none
  u64 nearly_copied;     // a phase for each row tile
  u64 queries[C.warps / 4];   // of each group, likewise
  u64 runs_there, runs_read;  // of lists longer than their ring: a phase for each half of it that is filled again
};

/// Behind the tiles, of a list: a ring, and the window in work.
template <FwdConfig C>
__device__ __forceinline__ u32* list_ring(char* memory, int ring) {
  return reinterpret_cast<u32*>(memory + C.tiles_end()) + ring * C.list_granules();
}
template <FwdConfig C>
__device__ __forceinline__ u32* list_window(char* memory) {
  return list_ring<C>(memory, C.list_rings());
}

/// Of a list that moves on by mma.sync: what the warps have measured of four tiles, which one of them brings together
/// behind the next barrier; and whether the masses of any row are unknown.
template <FwdConfig C, bool moves = C.skip != Skip::none>
struct MeasuredTiles {};
template <FwdConfig C>
struct MeasuredTiles<C, true> {
  float measured[2][C.warps][4];
  int blocks[2][4];  // key blocks; −1 for none
  int unknown;
};

/// Of products by mma.sync: in front of the block's memory, with the barriers of the rings of keys and of values.
template <FwdConfig C>
struct BlockMemory : SharedWork<C>, Descales<C.descales_at_once()>, MeasuredTiles<C> {
  u64 barriers[C.uses_tma() ? 4 * C.stages : 1];
  ListPosition collected;  // of a list's granules

  /// By all threads, behind a barrier and with one at the end.
  __device__ __forceinline__ void find_list(const FwdParams& p) {
    ListPosition at = collector(p).count(this->sequence, list_ring<C>(memory(), 0));
    if constexpr (C.skip == Skip::threshold) {
      if (this->tiles.descends) return find_descending(p);
    }
    if (at.rank < this->tiles.ranks().end) collector(p).fill(at, this->tiles.ranks().begin + C.list_granules());
    if (threadIdx.x == 0) collected = at;
    __syncthreads();
  }
  /// Tiles i to i + ahead of a list are to be read, and those before them no more. By all threads, behind a barrier.
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
  /// What a warp has to walk a list once more: memory of tiles.
  __device__ __forceinline__ u32* list_replay(int warp) {
    return reinterpret_cast<u32*>(memory() + FwdConfig::kWorkBytes + warp * C.list_replay_bytes());
  }

 private:
  // Of walks from the last tile to the first `collected` is the lowest rank in the ring.
  __device__ __forceinline__ void find_descending(const FwdParams& p) {
    const int begin = max(this->tiles.ranks().end - C.list_granules(), 0);
    if (begin > 0) collector(p).fill_between(begin, this->tiles.ranks().end);
    if (threadIdx.x == 0) collected = {begin, 0};
    __syncthreads();
  }
  // The ranks below `end` are to be read next.
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
