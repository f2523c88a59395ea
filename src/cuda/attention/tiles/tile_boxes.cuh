// SPDX-License-Identifier: Apache-2.0
// Copies of tiles of keys and values by the TMA: which boxes of the tensor a tile consists of, and where each goes.
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/tma.cuh"

namespace tessera::cuda {

/// What boxes require of a configuration; gathers(): the granules of a tile are not adjacent.
template <class Config>
concept BoxConfig = SourceConfig<Config> && requires(const Config& c) {
  int{c.tile_kv};
  bool{c.gathers()};
  bool{c.whole_rows};
};

/// Lanes that issue the copies of a tile; one if a tile is one box.
template <BoxConfig auto C>
inline constexpr int kCopiers = C.source == Source::strided && !C.gathers() ? 1 : 32;

/// The place of a row in a tensor map.
struct BoxPlace {
  int row;
  int batch;  // or page
};

/// Returns the place of key `key` of a segment. For a key beyond the segment's end it may be any place, even outside of
/// the tensor, where the TMA reads zeros.
template <BoxConfig auto C, TileWork Work>
__device__ __forceinline__ BoxPlace place_of(const Work& work, const KvParams& kv, int segment, int key) {
  const int first = work.sequence.segment(segment).extent.first;
  if (!KvRows<C>::is_paged(kv)) return {first + key, work.block.batch};
  const KvPages pages(kv, first, work.block.batch);
  const int entry = ptx::divide(key, kv.page_size);
  const int readable = C.trusts ? min(entry, pages.entries - 1) : entry;  // the TMA reads zeros outside of the pool
  return {key - entry * static_cast<int>(kv.page_size.value), pages.at<C.trusts>(readable)};
}

/// A tile that the TMA copies, and the place of a lane's first box. The place is looked up once for keys and values,
/// before shared memory for them is free, because reading the page table takes a while.
struct TileBoxes {
  KvTile tile;
  BoxPlace first;
};

template <BoxConfig auto C, TileWork Work>
__device__ __forceinline__ TileBoxes find_boxes(const Work& work, const KvParams& kv, const KvTile& tile, int lane) {
  const int row = kCopiers<C> == 1 ? 0 : lane * kv.box_rows;
  if (row >= C.tile_kv) return {tile, {}};
  return {tile, place_of<C>(work, kv, tile.segment, work.tiles.key(tile, row))};
}

/// Copies rows of a tile, as one box for each panel, from the given coordinates on. By one thread.
template <class Tile>
__device__ __forceinline__ void copy_box(const TensorMap* map, u32 to, u32 barrier, int head, int row, int batch) {
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel) {
    ptx::tma_load(to + panel * Tile::panel_bytes, map, barrier, panel * Tile::panel_columns, head, row, batch);
  }
}

/// The same for a tensor that may have one element for all heads or sequences: its stride there is 0.
template <class Tile>
__device__ __forceinline__ void copy_rows(const TensorMap* map, const Strides& strides, u32 to, u32 barrier, int head,
                                          int row, int batch) {
  copy_box<Tile>(map, to, barrier, strides.head == 0 ? 0 : head, row, strides.batch == 0 ? 0 : batch);
}

/// The same for a page's rows with all their columns, from a multiple of eight rows on.
__device__ __forceinline__ void copy_page_rows(const TensorMap* map, const PageSteps& steps, u32 to, u32 barrier,
                                               int head, const BoxPlace& place) {
  ptx::tma_load_rows(to, map, barrier, 0, place.row / 8, head * steps.head + place.batch * steps.page);
}

/// Copies a tile of keys or of values; `barrier` counts its bytes. The first kCopiers lanes of a warp each issue boxes
/// of their own. `steps`: for whole_rows.
template <BoxConfig auto C, class Tile, TileWork Work>
__device__ __forceinline__ void copy_tile(const Work& work, const KvParams& kv, const TensorMap* map,
                                          const Strides& strides, const TileBoxes& boxes, u32 to, u32 barrier, int lane,
                                          const PageSteps& steps = {}) {
  const int box_rows = kCopiers<C> == 1 ? C.tile_kv : kv.box_rows;
  const int head = strides.head == 0 ? 0 : work.block.kv_head;
  BoxPlace place = boxes.first;
  int row = lane * box_rows;
#pragma unroll 1
  while (row < C.tile_kv) {
    if constexpr (C.whole_rows) {
      copy_page_rows(map, steps, to + Tile::rows_below(row), barrier, head, place);
    } else {
      const int batch = strides.batch == 0 ? 0 : place.batch;
      copy_box<Tile>(map, to + Tile::rows_below(row), barrier, head, place.row, batch);
    }
    row += kCopiers<C> * box_rows;
    if (kCopiers<C> == 1 || row >= C.tile_kv) break;
    place = place_of<C>(work, kv, boxes.tile.segment, work.tiles.key(boxes.tile, row));
  }
}

}  // namespace tessera::cuda
