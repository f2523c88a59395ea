// SPDX-License-Identifier: Apache-2.0
// The place in memory of rows of keys and values, and copies of tiles of them to shared memory by cp.async.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/swizzle.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// The pages of one sequence and segment.
struct KvPages {
  const int* pages;  // entries of the page table; null if a mixed source has none
  int entries;       // how many may be read
  int count;         // pages of the pool

  KvPages() = default;
  /// `first`: of the sequence's entries in a CSR table.
  __device__ __forceinline__ KvPages(const KvParams& p, int first, int batch)
      : pages(p.page_indptr != nullptr ? p.page_table + first : p.page_table + batch * p.page_table_stride),
        entries(p.page_indptr != nullptr ? p.page_indices - first : p.page_indices),
        count(p.pages) {}

  /// Returns the page of an entry, clamped to the pool. With `trusts` it is not clamped, and the table must have the
  /// entry.
  template <bool trusts>
  __device__ __forceinline__ int at(int entry) const {
    if constexpr (trusts) return pages[entry];
    return entry < entries ? page_in_pool(pages[entry], count) : 0;
  }
};

/// What KvRows requires of a configuration.
template <class Config>
concept SourceConfig = requires(const Config& c) {
  Element{c.type};
  Source{c.source};
  bool{c.trusts};
};

/// Bytes of an element of K.
template <SourceConfig auto C>
constexpr int element_bytes_of_keys() {
  if constexpr (requires { C.k_type(); }) return bytes_of(C.k_type());
  return bytes_of(C.type);
}

/// The place of a row. It is looked up once for keys and values, before shared memory for the row is free.
struct RowPlace {
  int page;  // 0 where there are none
  int row;   // of the page, or of the sequence
};

/// The rows of K or of V of one (sequence, kv head, segment). Strides are in bytes. A row stride fits 32 bits, because
/// the launch refuses row strides of 2^29 elements and more.
template <SourceConfig auto C>
struct KvRows {
  static constexpr Source source = C.source;

  const char* base;
  int row_stride;
  i64 page_stride;
  KvPages pages;
  Divisor page_size;

  static __device__ __forceinline__ bool is_paged(const KvParams& p) {
    return source == Source::mixed ? p.page_table != nullptr : source == Source::paged;
  }

  KvRows() = default;
  __device__ __forceinline__ KvRows(const KvParams& p, const void* tensor, const Strides& strides, const Extent& extent,
                                    int batch, int head, int element_bytes = element_bytes_of_keys<C>())
      : base(static_cast<const char*>(tensor) + element_bytes * head * strides.head),
        row_stride(static_cast<int>(element_bytes * strides.row)) {
    if (!is_paged(p)) {
      base += element_bytes * (batch * strides.batch + extent.first * strides.row);
      if constexpr (source == Source::mixed) pages.pages = nullptr;
    } else {
      page_stride = element_bytes * strides.batch;
      pages = KvPages(p, extent.first, batch);
      page_size = p.page_size;
    }
  }

  // Selects field by field: an address that the compiler does not know would move both to local memory.
  static __device__ __forceinline__ KvRows either(bool is_first, const KvRows& a, const KvRows& b) {
    KvRows rows;
    rows.base = is_first ? a.base : b.base;
    rows.row_stride = is_first ? a.row_stride : b.row_stride;
    if constexpr (source != Source::strided) {
      rows.page_stride = is_first ? a.page_stride : b.page_stride;
      rows.pages.pages = is_first ? a.pages.pages : b.pages.pages;
      rows.pages.entries = is_first ? a.pages.entries : b.pages.entries;
      rows.pages.count = is_first ? a.pages.count : b.pages.count;
      rows.page_size.value = is_first ? a.page_size.value : b.page_size.value;
      rows.page_size.multiplier = is_first ? a.page_size.multiplier : b.page_size.multiplier;
      rows.page_size.shift = is_first ? a.page_size.shift : b.page_size.shift;
    }
    return rows;
  }

  /// For a strided source, makes `first` the row from which at() counts.
  __device__ __forceinline__ void advance(int first) {
    if constexpr (source == Source::strided) base = ptx::advance(base, first, row_stride);
  }

  /// find() returns the place of a row, and at() the address of a place.
  __device__ __forceinline__ RowPlace find(int row) const {
    if constexpr (source == Source::strided) return {0, row};
    if (source == Source::mixed && pages.pages == nullptr) return {0, row};
    const int entry = ptx::divide(row, page_size);
    return {pages.template at<C.trusts>(entry), row - entry * static_cast<int>(page_size.value)};
  }
  __device__ __forceinline__ const char* at(const RowPlace& place) const {
    if constexpr (source == Source::strided) return ptx::advance(base, place.row, row_stride);
    if (source == Source::mixed && pages.pages == nullptr) return ptx::advance(base, place.row, row_stride);
    return ptx::advance(base + place.page * page_stride, place.row, row_stride);
  }

  /// Address of row `first + row`.
  __device__ __forceinline__ const char* at(int first, int row) const {
    if constexpr (source == Source::strided) {
      return ptx::advance(base, row, row_stride);
    } else if (source == Source::mixed && pages.pages == nullptr) {
      return ptx::advance(base, first + row, row_stride);
    } else {
      const int entry = ptx::divide(first + row, page_size);
      const int within = first + row - entry * static_cast<int>(page_size.value);
      return ptx::advance(base + pages.template at<C.trusts>(entry) * page_stride, within, row_stride);
    }
  }
};

/// Copies a tile of rows by cp.async, `columns` elements of each; address(row) returns the address of a row. Rows from
/// `valid_rows` on and columns from `columns` on become zeros, because a stale NaN times a weight of 0 would be NaN.
template <class Tile, int threads, class Address>
__device__ __forceinline__ void load_tile(u32 to, int valid_rows, int columns, int thread, Address address) {
  constexpr int rows_a_step = threads / Tile::row_chunks;
  static_assert(threads % Tile::row_chunks == 0 && Tile::rows % rows_a_step == 0 && rows_a_step % 8 == 0);
  const int first_row = thread / Tile::row_chunks;
  const int chunk = thread % Tile::row_chunks;
  const u32 first = to + Tile::at(first_row, chunk);
  const auto for_each = [&](auto copy) {
#pragma unroll
    for (int step = 0; step < Tile::rows / rows_a_step; ++step) {
      copy(step * rows_a_step + first_row, first + Tile::rows_below(step * rows_a_step));
    }
  };
  if (valid_rows >= Tile::rows && columns == Tile::columns) {  // nearly always: no test for each copy
    for_each([&](int row, u32 at) {
      const char* from = address(row) + chunk * kChunkBytes;
#pragma unroll
      for (int panel = 0; panel < Tile::panels; ++panel) {
        ptx::cp_async_16(at + panel * Tile::panel_bytes, from + panel * Tile::row_bytes);
      }
    });
    return;
  }
  for_each([&](int row, u32 at) {
    const bool row_valid = row < valid_rows;
    const char* from = address(row_valid ? row : 0);
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      const int column = panel * Tile::panel_columns + chunk * Tile::chunk_elements;
      const bool valid = row_valid && column < columns;
      ptx::cp_async_16_or_zeros(at + panel * Tile::panel_bytes, valid ? from + column * bytes_of(Tile::type) : from,
                                valid);
    }
  });
}

/// The address of a row. A row that is not valid still has an address that can be read.
struct RowAddress {
  const char* at;
  bool valid;
};

/// The same for rows with any addresses: address(row) returns the RowAddress of each.
template <class Tile, int threads, class Address>
__device__ __forceinline__ void load_rows(u32 to, int columns, int thread, Address address) {
  constexpr int rows_a_step = threads / Tile::row_chunks;
  static_assert(threads % Tile::row_chunks == 0 && Tile::rows % rows_a_step == 0 && rows_a_step % 8 == 0);
  const int first_row = thread / Tile::row_chunks;
  const int chunk = thread % Tile::row_chunks;
  const u32 first = to + Tile::at(first_row, chunk);
#pragma unroll
  for (int step = 0; step < Tile::rows / rows_a_step; ++step) {
    const RowAddress from = address(step * rows_a_step + first_row);
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel) {
      const int column = panel * Tile::panel_columns + chunk * Tile::chunk_elements;
      const bool valid = from.valid && column < columns;
      ptx::cp_async_16_or_zeros(first + Tile::rows_below(step * rows_a_step) + panel * Tile::panel_bytes,
                                valid ? from.at + column * bytes_of(Tile::type) : from.at, valid);
    }
  }
}

}  // namespace tessera::cuda
