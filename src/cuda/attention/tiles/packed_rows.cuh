// SPDX-License-Identifier: Apache-2.0
// Heads that share keys (GQA), packed into the rows of a tile.
#pragma once

#include "cuda/attention/tiles/tile_schedule.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// The heads of a group are packed into the rows: row = query · group + head of the group.
struct PackedRow {
  int query;
  int head;

  __device__ __forceinline__ PackedRow(int row, const Divisor& group)
      : query(ptx::divide(row, group)), head(static_cast<int>(row - query * group.value)) {}
};

/// Addresses of a block's packed rows in a tensor (batch, row, head). A row stride in bytes fits 32 bits, because the
/// launch refuses row strides of 2^29 elements and more.
struct PackedRows {
  const char* first;  // query 0 of the sequence, first head of the block
  int row_stride;
  i64 head_stride;
  int first_row;
  const Divisor& group;

  __device__ __forceinline__ PackedRows(const void* tensor, int element_bytes, const Strides& strides,
                                        const Block& block, int first_token, const Divisor& heads)
      : PackedRows(
            static_cast<const char*>(tensor) +
                element_bytes * (block.batch * strides.batch + first_token * strides.row + block.head * strides.head),
            element_bytes, strides, block, heads) {}
  __device__ __forceinline__ PackedRows(const char* first_query, int element_bytes, const Strides& strides,
                                        const Block& block, const Divisor& heads)
      : first(first_query),
        row_stride(static_cast<int>(element_bytes * strides.row)),
        head_stride(element_bytes * strides.head),
        first_row(block.first_row),
        group(heads) {}

  /// Where a row of the tile begins.
  __device__ __forceinline__ const char* at(int row) const {
    if (group.value == 1) return ptx::advance(first, first_row + row, row_stride);
    const PackedRow packed(first_row + row, group);
    return ptx::advance(first + packed.head * head_stride, packed.query, row_stride);
  }
  __device__ __forceinline__ char* writable(int row) const { return const_cast<char*>(at(row)); }
};

}  // namespace tessera::cuda
