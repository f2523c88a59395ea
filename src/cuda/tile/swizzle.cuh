// SPDX-License-Identifier: Apache-2.0
// How a tile of 16-bit rows lies in shared memory.
//
// A tile is cut along its columns into panels of 64 elements (128 bytes), or of 32 (64 bytes) where the row is no
// multiple of 64; panel p holds all rows, one after another. Within a row the 16-byte chunks are exchanged by the row's
// number:
//
//     128-byte rows: chunk ^ (row % 8)            64-byte rows: chunk ^ (row / 2 % 4)
//
// Eight rows of one column then lie in eight different groups of banks, which is what ldmatrix reads at a time. These
// are also the layouts that a TMA box of one panel writes with SWIZZLE_128B and SWIZZLE_64B.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

template <int rows_, int columns_>
struct SharedTile {
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = columns_of_panel(columns);
  static constexpr int panels = columns / panel_columns;
  static constexpr int row_chunks = panel_columns / 8;  // 16 bytes each
  static constexpr int panel_bytes = rows * panel_columns * 2;
  static constexpr int bytes = panels * panel_bytes;
  static_assert(columns % 32 == 0 && rows % 8 == 0);

  /// Offset of chunk `chunk` (8 elements) of a row.
  static __device__ __forceinline__ u32 at(int row, int chunk) {
    const int panel = chunk / row_chunks;
    const int within = chunk % row_chunks;
    const int turned = within ^ (row_chunks == 8 ? row & 7 : (row >> 1) & 3);
    return static_cast<u32>(panel * panel_bytes + row * (panel_columns * 2) + turned * 16);
  }

  /// Row of a byte of the tile.
  static __device__ __forceinline__ int row_of(int offset) { return offset % panel_bytes / (panel_columns * 2); }

  /// at(row, chunk + 2·pair) from at(row, chunk) with chunk 0 or 1, for a tile that begins at a multiple of 128 bytes:
  /// exchanging chunks is an exclusive or with bits that neither row nor base touch, one instruction with a constant.
  static __device__ __forceinline__ u32 chunk_pair(u32 address, int pair) {
    const int panel = pair * 2 / row_chunks;
    return (address ^ static_cast<u32>(pair * 2 % row_chunks * 16)) + static_cast<u32>(panel * panel_bytes);
  }
  /// Offset of rows `count` below, a multiple of 8 of them.
  static constexpr u32 rows_below(int count) { return static_cast<u32>(count * panel_columns * 2); }
};

}  // namespace tessera::cuda
