// SPDX-License-Identifier: Apache-2.0
// Element tests, for masks that are not one interval of keys for each row: they give bits, by which scores are then
// masked.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/tiles/list_reader.cuh"
#include "cuda/attention/tiles/tile_work.cuh"

namespace tessera::cuda {

/// What element tests require of a configuration; tests_elements(): whether there are any.
template <class Config>
concept ElementMaskConfig = requires(const Config& c) {
  int{c.d};
  int{c.tile_kv};
  bool{c.list_elements};
  bool{c.user_mask};
  bool{c.tests_elements()};
};

/// How many columns have their loads in flight together, as registers allow.
template <ElementMaskConfig Config>
constexpr int columns_tested_at_once(const Config& c) {
  if constexpr (requires { int{c.mask_columns()}; }) return c.mask_columns();
  return c.d > 192 ? 1 : 4;
}

/// The keys of a tile that are hidden from a thread's two rows of a 16-row tile. Each row has a word; its bit 2n + i is
/// that of value i of the n-th tile of 8 columns.
template <ElementMaskConfig auto C>
struct HiddenBits {
  static constexpr int row_bits = C.tile_kv / 4;
  static_assert(!C.tests_elements() || row_bits <= 32);
  static constexpr int columns_at_once = columns_tested_at_once(C);
  static constexpr int loads_at_once = 16;
  u32 upper, lower;

  __device__ __forceinline__ void clear() { upper = lower = 0; }

  /// hides(half, column): whether a key is hidden from one of the two rows.
  template <int at_once = columns_at_once, class Hides>
  __device__ __forceinline__ void find(int lane, Hides hides) {
    clear();
    const auto test = [&](int half, int e) -> u32 {
      return hides(half, e / 2 * 8 + lane % 4 * 2 + e % 2) ? 1U << e : 0;
    };
    if constexpr (C.list_elements) {  // a row at a time: its keys mostly share a block of the list
#pragma unroll 1
      for (int e = 0; e < row_bits; ++e) upper |= test(0, e);
#pragma unroll 1
      for (int e = 0; e < row_bits; ++e) lower |= test(1, e);
    } else {
      // User code is long, and its loads take a while. What it computes of a key serves both rows.
#pragma unroll at_once
      for (int e = 0; e < row_bits; ++e) {
        if (at_once > loads_at_once && e % loads_at_once == 0) __syncwarp();  // keeps later loads from moving up
        upper |= test(0, e);
        lower |= test(1, e);
      }
    }
  }

  /// Whether all keys are hidden from all rows of the warp.
  __device__ __forceinline__ bool are_all_hidden() const {
    constexpr u32 all = 0xffffffffU >> (32 - row_bits);
    return __all_sync(0xffffffffU, (upper & lower) == all) != 0;
  }

  __device__ __forceinline__ bool at(int half, int n, int i) const {
    return ((half == 0 ? upper : lower) >> (n * 2 + i) & 1) != 0;
  }
};

/// Whether a tile gathers granules of a list that may waive the mask in some of them.
template <ElementMaskConfig Config>
constexpr bool has_parts(const Config& c) {
  if constexpr (requires { c.list_waives&& c.gathers(); }) return c.list_waives && c.gathers();
  return false;
}

/// Whether an earlier kernel has computed the bits of the mask.
template <ElementMaskConfig Config>
constexpr bool has_mask_bits(const Config& c) {
  if constexpr (requires { bool{c.mask_bits}; }) return c.mask_bits;
  return false;
}

/// Looks up elements of a row in the list, if a tile has keys or rows of several of the list's tiles. Neighbours mostly
/// share a tile of the list, so the last result is kept.
struct ListedKeys {
  const ListReader& reader;
  int query_block = -1;
  int key_block = -1;
  ListClass listed = ListClass::none;

  /// `key`: within its segment, below its length; `query`: below the sequence's length.
  __device__ __forceinline__ ListClass find(int query, int segment, int key) {
    const int q = ptx::divide(query, reader.p.block_q);
    const int k = ptx::divide(key, reader.p.block_kv) + (segment == 0 ? 0 : reader.p.second_block);
    if (q != query_block || k != key_block) {
      query_block = q;
      key_block = k;
      listed = reader.find(q, k);
    }
    return listed;
  }
};

/// Finds what the list or the user's mask hides of a block's tiles.
template <ElementMaskConfig auto C, class Mask, TileWork Work>
struct ElementMask {
  const AttentionParams& p;
  const Work& work;

  /// `row`: the upper of the thread's two packed rows. `Position`: the integer type in which the mask may compute. Bits
  /// of rows and keys beyond the ends of the sequence are undefined.
  template <class Position>
  __device__ __forceinline__ void find(HiddenBits<C>& hidden, int row, const KvTile& tile, int lane) const {
    if constexpr (has_mask_bits(C)) {
      hidden.upper = load_bits(PackedRow(row, p.group).query, tile, lane % 4);
      hidden.lower = load_bits(PackedRow(row + 8, p.group).query, tile, lane % 4);
      return;
    }
    const ListReader reader = list();
    ListedKeys listed{reader};
    if (is_waived(tile)) {
      hidden.clear();
      return;
    }
    // The 64-bit version of user code is rarely used, so it is unrolled less.
    constexpr int most = HiddenBits<C>::columns_at_once;
    constexpr int at_once = sizeof(Position) == 8 && most > 4 ? 4 : most;
    hidden.template find<at_once>(lane, [&](int half, int column) -> bool {
      const PackedRow at(row + half * 8, p.group);
      const int key = work.tiles.key(tile, column);
      if constexpr (C.list_elements) {
        const int keys = work.sequence.segment(tile.segment).extent.length;
        if (at.query >= work.sequence.q.length || key >= keys) return true;
      }
      return hides<Position, parts_are_waived>(at, tile, column, key, listed);
    });
  }

  /// Whether the list waives the mask in all parts of a tile.
  __device__ __forceinline__ bool is_waived(const KvTile& tile) const {
    if constexpr (C.user_mask && parts_are_waived) {
      bool waived = true;
#pragma unroll
      for (int column = 0; column < C.tile_kv; column += C.granule) waived = waived && work.tiles.waives(tile, column);
      return waived;
    }
    return false;
  }

  /// Whether a list may waive the mask in a part of a tile. What it waives in a whole tile is KvTile::waived.
  static constexpr bool parts_are_waived = has_parts(C);

  /// With list_elements `key` is below its segment's length and the query below the sequence's; `listed` reads list().
  template <class Position, bool asks_list = true>
  __device__ __forceinline__ bool hides(const PackedRow& at, const KvTile& tile, int column, int key,
                                        ListedKeys& listed) const {
    if constexpr (C.list_elements) {
      const ListClass found = listed.find(at.query, tile.segment, key);
      if (found == ListClass::none) return true;
      if (found == ListClass::full) return false;
    }
    if constexpr (has_mask_bits(C)) {
      const int word = column % 8 / 2;
      return (load_bits(at.query, tile, word) >> (column / 8 * 2 + column % 2) & 1) != 0 && !tile.waived;
    }
    if constexpr (C.user_mask) {
      const i64 position = work.sequence.segment(tile.segment).position + key;
      const bool visible = Mask::template visible<Position>(point_of(p, work, at, position), p.extras);
      return !((asks_list && work.tiles.waives(tile, column)) | visible);
    }
    return false;
  }

  /// Loads bits of the mask for a query: bit 2n + i is that of column 8n + 2 · `word` + i.
  __device__ __forceinline__ u32 load_bits(int query, const KvTile& tile, int word) const {
    static_assert(kMaskBlock % C.tile_kv == 0);
    const MaskBits& bits = p.list.mask_bits;
    const int block = tile.first / kMaskBlock + (tile.segment == 0 ? 0 : bits.second_block);
    const u32 all = bits.words[work.block.batch * bits.batch_stride + query * i64{bits.row_words} + block * 4 + word];
    return all >> (tile.first % kMaskBlock / 4) & (0xffffffffU >> (32 - HiddenBits<C>::row_bits));
  }

  __device__ __forceinline__ ListReader list() const {
    return ListReader(p.list, work.block.batch, work.block.head, work.block.kv_head);
  }
};

}  // namespace tessera::cuda
