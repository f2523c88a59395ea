// SPDX-License-Identifier: Apache-2.0
// What a block of the forward has to do: its rows, its sequence, the tiles that it walks and where they lie. It is a
// HidingWork (tiles/tile_work.cuh).
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/dropout.cuh"
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
        this->values[i] = KvRows<C>(kv, kv.v, kv.v_strides, extent, block.batch, block.kv_head);
      }
    }
    return true;
  }

  /// Whether any key of the tile may weigh 0 for a row.
  __device__ __forceinline__ bool may_hide(const KvTile& tile) const {
    return C.dropout || C.tests_elements() || tile.cut_begin || tile.cut_end;
  }

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

/// With the barriers of the rings of keys and of values, of products by mma.sync.
template <FwdConfig C>
struct BlockMemory : SharedWork<C> {
  u64 barriers[C.uses_tma() ? 4 * C.stages : 1];
};

}  // namespace tessera::cuda
