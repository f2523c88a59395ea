// SPDX-License-Identifier: Apache-2.0
// A warp's own ring of tiles of keys and values, which the warp copies and reads itself. It waits for no other warp,
// and begins a copy as soon as it has read a tile. docs/kernels.md, section 13.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/tiles/tile_boxes.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace tessera::cuda {

/// Copies a tile of rows; a whole warp calls this. address(row): the address of a row, called by all lanes. Rows from
/// `valid_rows` on and columns past `columns` become zeros.
template <class Tile, class Address>
__device__ __forceinline__ void copy_rows_by_warp(u32 to, int valid_rows, int columns, int lane, Address address) {
  constexpr int rows_a_step = 32 / Tile::row_chunks;  // 4 or 8
  constexpr int steps = Tile::rows / rows_a_step;
  static_assert(Tile::rows % (2 * rows_a_step) == 0);
  const int first_row = lane / Tile::row_chunks;
  const int chunk = lane % Tile::row_chunks;
  // Rows that are a multiple of eight apart have the same swizzle.
  const u32 first[2] = {to + Tile::at(first_row, chunk), to + Tile::at(first_row + rows_a_step, chunk)};
  const bool whole = valid_rows >= Tile::rows && columns == Tile::columns;  // nearly always
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    const int row = step * rows_a_step + first_row;
    const u32 at = first[step % 2] + Tile::rows_below(step / 2 * 2 * rows_a_step);
    const char* from = address(row);
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      const int column = panel * Tile::panel_columns + chunk * Tile::chunk_elements;
      const bool valid = whole || (row < valid_rows && column < columns);
      ptx::cp_async_16_or_zeros(at + panel * Tile::panel_bytes, valid ? from + column * bytes_of(Tile::type) : from,
                                valid);
    }
  }
}

/// Uses of the ring are numbered from 0; use u has tile warp + u · warps of the block's walk.
template <FwdConfig C>
struct WarpRing {
  using KTile = SharedTile<C.k_type(), C.tile_kv, C.d>;
  using VTile = SharedTile<C.v_type(), C.tile_kv, C.dv>;
  static_assert(C.tile_kv <= 32);  // a lane for each row

  const AttentionParams& p;
  const TensorMaps* maps;
  const BlockWork<C>& work;
  u32 memory;    // of the warp's tiles
  u32 barriers;  // mbarriers of the warp's stages, for TMA
  int warp, lane;

  __device__ __forceinline__ int tile_of(int use) const { return warp + use * C.warps; }
  __device__ __forceinline__ u32 k_at(int use) const {
    return memory + static_cast<u32>(use) % C.stages * (C.k_bytes() + C.v_bytes());
  }
  __device__ __forceinline__ u32 v_at(int use) const { return k_at(use) + C.k_bytes(); }
  __device__ __forceinline__ u32 full(int use) const { return barriers + static_cast<u32>(use) % C.stages * 8; }

  /// Where the rows of a tile are, as its copies need it: this lane's row, or the first of its boxes.
  struct Places {
    KvTile tile;
    RowPlace row;
    BoxPlace box;
  };
  /// `count`: the number of the block's tiles. Nothing is looked up for a tile behind them.
  __device__ __forceinline__ Places find(int use, int count) const {
    Places places{};
    const int i = tile_of(use);
    if (i >= count) return places;
    places.tile = work.tiles.at(i);
    const int segment = C.segments == 2 ? places.tile.segment : 0;
    if constexpr (C.uses_tma()) {
      places.box = find_boxes<C>(work, p.kv[segment], places.tile, lane).first;
    } else {
      const int length = work.sequence.segment(segment).extent.length;
      places.row = keys(segment).find(min(places.tile.first + lane % C.tile_kv, length - 1));
    }
    return places;
  }

  /// Begins the copies of the first tiles; the copies of Q must have begun before. Returns what the next copy() needs.
  __device__ __forceinline__ Places begin(int count) const {
    if constexpr (C.uses_tma()) {
      if (lane == 0) {
#pragma unroll
        for (int stage = 0; stage < C.stages; ++stage) ptx::mbarrier_init(full(stage), 1);
        ptx::fence_mbarrier_init();
      }
      __syncwarp();
    }
    Places first[C.stages];
#pragma unroll
    for (int use = 0; use < C.stages; ++use) first[use] = find(use, count);
#pragma unroll
    for (int use = 0; use < C.stages; ++use) copy(use, count, first[use]);
    return find(C.stages, count);
  }

  /// Begins the copy of a tile, if the block has it. Nobody may read its memory any more.
  __device__ __forceinline__ void copy(int use, int count, const Places& places) const {
    if constexpr (C.uses_tma()) {
      if (tile_of(use) < count) copy_boxes(use, places);
    } else {
      if (tile_of(use) < count) copy_rows(use, places);
      ptx::cp_async_commit();
    }
  }

  /// Waits until the tile of a use has arrived for all lanes. The `later` tiles whose copies began after it need not
  /// have arrived.
  template <int later>
  __device__ __forceinline__ void wait(int use) const {
    if constexpr (C.uses_tma()) {
      ptx::mbarrier_wait(full(use), static_cast<u32>(use) / C.stages & 1);
    } else {
      ptx::cp_async_wait<later>();
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ KvRows<C> keys(int segment) const {
    if constexpr (C.segments == 2) return KvRows<C>::either(segment == 0, work.keys[0], work.keys[1]);
    return work.keys[0];
  }
  __device__ __forceinline__ KvRows<C> values(int segment) const {
    if constexpr (C.segments == 2) return KvRows<C>::either(segment == 0, work.values[0], work.values[1]);
    return work.values[0];
  }

  __device__ __forceinline__ void copy_rows(int use, const Places& places) const {
    const int segment = C.segments == 2 ? places.tile.segment : 0;
    const int rows = work.sequence.segment(segment).extent.length - places.tile.first;
    const auto copy = [&](const KvRows<C>& source, auto tile, u32 to, int columns) {
      copy_rows_by_warp<decltype(tile)>(to, rows, columns, lane, [&](int row) {
        if constexpr (C.source == Source::strided)
          return source.at(RowPlace{0, places.tile.first + min(row, rows - 1)});
        return source.at(
            RowPlace{__shfl_sync(0xffffffffU, places.row.page, row), __shfl_sync(0xffffffffU, places.row.row, row)});
      });
    };
    copy(keys(segment), KTile{}, k_at(use), p.d);
    copy(values(segment), VTile{}, v_at(use), p.dv);
  }

  __device__ __forceinline__ void copy_boxes(int use, const Places& places) const {
    const int segment = C.segments == 2 ? places.tile.segment : 0;
    const KvParams& kv = p.kv[segment];
    const TileBoxes boxes{places.tile, places.box};
    if (lane == 0) ptx::mbarrier_arrive_expecting(full(use), C.k_bytes() + C.v_bytes());
    if constexpr (kCopiers<C> > 1) __syncwarp();  // other lanes copy only after expect_tx
    copy_tile<C, KTile>(work, kv, maps->keys + segment, kv.k_strides, boxes, k_at(use), full(use), lane);
    copy_tile<C, VTile>(work, kv, maps->values + segment, kv.v_strides, boxes, v_at(use), full(use), lane);
  }
};

}  // namespace tessera::cuda
