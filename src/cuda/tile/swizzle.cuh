// SPDX-License-Identifier: Apache-2.0
// How a tile of rows lies in shared memory.
//
// A tile is cut along its columns into panels of 128 bytes, or of 64 where the row is no multiple of 128; panel p holds
// all rows, one after another. Within a row the 16-byte chunks are exchanged by the row's number:
//
//     128-byte rows: chunk ^ (row % 8)            64-byte rows: chunk ^ (row / 2 % 4)
//
// Eight rows of one column then lie in eight different groups of banks, which is what ldmatrix reads at a time. These
// are also the layouts that a TMA box of one panel writes with SWIZZLE_128B and SWIZZLE_64B.
//
// With `whole_rows` eight rows of all panels lie together instead, panel after panel, so that a box of five dimensions
// brings some rows with all their columns. wgmma takes either layout, its descriptors name the distances.
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

  /// Row of a byte of the tile.
  static __device__ __forceinline__ int row_of(int offset) {
    if (whole_rows) return offset / eight_rows * 8 + offset % panel_bytes / row_bytes;
    return offset % panel_bytes / row_bytes;
  }

  /// at(row, chunk + 2·pair) from at(row, chunk) with chunk 0 or 1, for a tile that begins at a multiple of 128 bytes:
  /// exchanging chunks is an exclusive or with bits that neither row nor base touch, one instruction with a constant.
  static __device__ __forceinline__ u32 chunk_pair(u32 address, int pair) {
    const int panel = pair * 2 / row_chunks;
    return (address ^ static_cast<u32>(pair * 2 % row_chunks * kChunkBytes)) + static_cast<u32>(panel * panel_bytes);
  }
  /// Offset of rows `count` below, a multiple of 8 of them.
  static constexpr u32 rows_below(int count) { return static_cast<u32>(count * (eight_rows / 8)); }
};

}  // namespace tessera::cuda
