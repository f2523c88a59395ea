// SPDX-License-Identifier: Apache-2.0
// Where the rows of a tile of keys live, and how they come into shared memory.
#pragma once

#include "cuda/policy/sequence.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/swizzle.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// The rows of K or of V of one (sequence, kv head, segment). Offsets within a tile are 32-bit: the plan refuses row
/// strides of 2^24 elements and more.
template <Source source>
struct KvRows {
  const unsigned short* base;  // of 16-bit elements
  i64 row_stride;
  i64 page_stride;
  const int* pages;  // this sequence's entries of the table
  int page_entries;  // of them, readable
  int page_size;
  int page_count;  // of the pool

  __device__ __forceinline__ KvRows(const KvParams& p, const void* tensor, const Strides& strides, const Extent& extent,
                                    int batch, int head)
      : base(static_cast<const unsigned short*>(tensor) + head * strides.head), row_stride(strides.row) {
    if constexpr (source == Source::strided) {
      base += batch * strides.batch + extent.first * strides.row;
    } else {
      page_stride = strides.batch;
      pages = p.page_indptr != nullptr ? p.page_table + extent.first : p.page_table + batch * p.page_table_stride;
      page_entries = p.page_indptr != nullptr ? p.page_indices - extent.first : p.page_indices;
      page_size = p.page_size;
      page_count = p.pages;
    }
  }

  /// Makes `first` the row that at() counts from.
  __device__ __forceinline__ void advance(int first) {
    if constexpr (source == Source::strided) base += first * row_stride;
  }

  /// Address of row `first + row`.
  __device__ __forceinline__ const unsigned short* at(int first, int row) const {
    if constexpr (source == Source::strided) {
      return base + static_cast<i64>(row) * static_cast<int>(row_stride);
    } else {
      const int entry = (first + row) / page_size;
      const int page = entry < page_entries ? clamp(pages[entry], 0, page_count - 1) : 0;
      return base + page * page_stride + (first + row - entry * page_size) * row_stride;
    }
  }
};

/// A tile of rows by cp.async, `columns` elements of each. Rows from `valid_rows` on and columns past `columns` become
/// zeros, so that no stale NaN meets a weight of 0.
template <class Tile, int threads, class Address>
__device__ __forceinline__ void load_tile(u32 to, int valid_rows, int columns, int thread, Address address) {
  constexpr int rows_a_step = threads / Tile::row_chunks;
  const int first_row = thread / Tile::row_chunks;
  const int chunk = thread % Tile::row_chunks;
  const u32 first = to + Tile::at(first_row, chunk);
  const bool whole = valid_rows >= Tile::rows && columns == Tile::columns;
#pragma unroll
  for (int step = 0; step < Tile::rows / rows_a_step; ++step) {
    const int row = step * rows_a_step + first_row;
    const bool row_valid = whole || row < valid_rows;
    const unsigned short* from = address(row_valid ? row : 0) + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      const u32 at = first + panel * Tile::panel_bytes + Tile::rows_below(step * rows_a_step);
      const bool valid = row_valid && (whole || panel * Tile::panel_columns + chunk * 8 < columns);
      ptx::cp_async_16(at, valid ? from + panel * Tile::panel_columns : from - chunk * 8, valid);
    }
  }
  static_assert(threads % Tile::row_chunks == 0 && Tile::rows % rows_a_step == 0 && rows_a_step % 8 == 0);
}

}  // namespace tessera::cuda
