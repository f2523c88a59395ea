// SPDX-License-Identifier: Apache-2.0
// What a block of the forward has to do: its rows, its sequence, the tiles that it walks and where they lie.
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/tiles/tile_list.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda {

/// Where keys and values lie, for threads that copy them; TMA is told no addresses.
template <FwdConfig C, bool by_threads = !C.uses_tma()>
struct KvAddresses {
  KvRows<C.source, C.trusts> keys[C.segments], values[C.segments];
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
        this->keys[i] = KvRows<C.source, C.trusts>(kv, kv.k, kv.k_strides, extent, block.batch, block.kv_head);
        this->values[i] = KvRows<C.source, C.trusts>(kv, kv.v, kv.v_strides, extent, block.batch, block.kv_head);
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

  /// `key`: of a segment.
  __device__ __forceinline__ ScorePoint point_of(const FwdParams& p, const PackedRow& at, int segment, int key) const {
    return {p.batch_offset + block.batch, p.head_offset + block.head + at.head, sequence.q_position + at.query,
            sequence.segment(segment).position + key};
  }
};

/// Lanes that ask TMA for a tile: one where a tile is one box.
template <FwdConfig C>
inline constexpr int kCopiers = C.source == Source::strided && !C.gathers() ? 1 : 32;

/// Where TMA finds a row: coordinates of the tensor.
struct BoxPlace {
  int row;
  int batch;  // or page
};

/// Of key `key` of a segment, which may lie beyond its end: then anywhere. What the engine finds outside of the tensor
/// are zeros.
template <FwdConfig C>
__device__ __forceinline__ BoxPlace place_of(const BlockWork<C>& work, const KvParams& kv, int segment, int key) {
  const int first = work.sequence.segment(segment).extent.first;
  if (!KvRows<C.source, C.trusts>::is_paged(kv)) return {first + key, work.block.batch};
  const KvPages pages(kv, first, work.block.batch);
  const int entry = ptx::divide(key, kv.page_size);
  const int readable = C.trusts ? min(entry, pages.entries - 1) : entry;  // the engine finds no page outside the pool
  return {key - entry * static_cast<int>(kv.page_size.value), pages.at<C.trusts>(readable)};
}

/// A tile for TMA, and where the first of a lane's boxes lies: looked up before there is memory for it,
/// since pages take a while, and once for keys and values.
struct TileBoxes {
  KvTile tile;
  BoxPlace first;
};

template <FwdConfig C>
__device__ __forceinline__ TileBoxes find_boxes(const BlockWork<C>& work, const KvParams& kv, const KvTile& tile,
                                                int lane) {
  const int row = kCopiers<C> == 1 ? 0 : lane * kv.box_rows;
  if (row >= C.tile_kv) return {tile, {}};
  return {tile, place_of(work, kv, tile.segment, work.tiles.key(tile, row))};
}

/// Rows of a tile that are one box for each panel, from coordinates of the tensor on. By one thread.
template <class Tile>
__device__ __forceinline__ void copy_box(const TensorMap* map, u32 to, u32 barrier, int head, int row, int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel) {
    ptx::tma_load(to + panel * Tile::panel_bytes, map, barrier, panel * Tile::panel_columns, head, row, batch);
  }
}

/// A tile of keys or of values by TMA, whose bytes count at `barrier`. By the first kCopiers lanes of a
/// warp, each of its boxes.
template <class Tile, FwdConfig C>
__device__ __forceinline__ void copy_tile(const BlockWork<C>& work, const KvParams& kv, const TensorMap* map,
                                          const Strides& strides, const TileBoxes& boxes, u32 to, u32 barrier,
                                          int lane) {
  const int box_rows = kCopiers<C> == 1 ? C.tile_kv : kv.box_rows;
  const int head = strides.head == 0 ? 0 : work.block.kv_head;
  BoxPlace place = boxes.first;
  int row = lane * box_rows;
#pragma unroll 1
  while (row < C.tile_kv) {
    const int batch = strides.batch == 0 ? 0 : place.batch;
    copy_box<Tile>(map, to + Tile::rows_below(row), barrier, head, place.row, batch);
    row += kCopiers<C> * box_rows;
    if (kCopiers<C> == 1 || row >= C.tile_kv) break;
    place = place_of(work, kv, boxes.tile.segment, work.tiles.key(boxes.tile, row));
  }
}

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
