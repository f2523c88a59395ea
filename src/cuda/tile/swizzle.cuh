// SPDX-License-Identifier: Apache-2.0
// The layout of a tile of rows in shared memory.
//
// A tile is cut along its columns into panels of 128 bytes, or of 64 bytes if a row is not a multiple of 128. Each
// panel holds its part of all rows, one after another. Within a row the 16-byte chunks are permuted by the row's index:
//
//     128-byte rows: chunk ^ (row % 8)            64-byte rows: chunk ^ (row / 2 % 4)
//
// Then chunks of the same columns in eight consecutive rows, which ldmatrix reads at a time, lie in eight different
// groups of banks. A TMA box of one panel has the same layouts with SWIZZLE_128B and SWIZZLE_64B.
//
// With `whole_rows`, eight rows of all panels lie together instead, panel after panel, so that one box of five
// dimensions loads rows with all their columns. wgmma takes either layout, because its descriptors contain the
// distances.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

template <Element type_, int rows_, int columns_, bool whole_rows = false>
struct SharedTile {
  static constexpr Element type = type_;
  static constexpr int rows = rows_;
  static constexpr int columns = columns_;
  static constexpr int panel_columns = columns_of_panel(type, columns);
  static constexpr int panels = columns / panel_columns;
  static constexpr int row_bytes = panel_columns * bytes_of(type);  // of a panel
  static constexpr int row_chunks = row_bytes / kChunkBytes;
  static constexpr int chunk_elements = elements_of_chunk(type);
  static constexpr int panel_bytes = (whole_rows ? 8 : rows) * row_bytes;       // from a panel to the next
  static constexpr int eight_rows = (whole_rows ? panels : 1) * 8 * row_bytes;  // from eight rows to the next
  static constexpr int bytes = panels * rows * row_bytes;
  static_assert(columns % panel_columns == 0 && rows % 8 == 0);

  /// Offset of chunk `chunk` of a row.
  static __device__ __forceinline__ u32 at(int row, int chunk) {
    const int panel = chunk / row_chunks;
    const int within = chunk % row_chunks;
    const int turned = within ^ (row_chunks == 8 ? row & 7 : (row >> 1) & 3);
    const int line = whole_rows ? row / 8 * eight_rows + row % 8 * row_bytes : row * row_bytes;
    return static_cast<u32>(panel * panel_bytes + line + turned * kChunkBytes);
  }

  /// Row of the byte at `offset` in the tile.
  static __device__ __forceinline__ int row_of(int offset) {
    if (whole_rows) return offset / eight_rows * 8 + offset % panel_bytes / row_bytes;
    return offset % panel_bytes / row_bytes;
  }

  /// Returns the address of chunk `chunk + 2·pair` of a row from that of its chunk `chunk`, which is 0 or 1. The tile
  /// begins at a multiple of 128 bytes. Then 2·pair is added to bits that are 0, and the swizzle is an exclusive or, so
  /// that one exclusive or with a constant does both.
  static __device__ __forceinline__ u32 chunk_pair(u32 address, int pair) {
    const int panel = pair * 2 / row_chunks;
    return (address ^ static_cast<u32>(pair * 2 % row_chunks * kChunkBytes)) + static_cast<u32>(panel * panel_bytes);
  }
  /// Offset of the row that lies `count` rows below; `count` is a multiple of 8.
  static constexpr u32 rows_below(int count) { return static_cast<u32>(count * (eight_rows / 8)); }
};

}  // namespace tessera::cuda
