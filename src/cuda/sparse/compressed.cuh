// SPDX-License-Identifier: Apache-2.0
// The extents of a sequence's tokens and compressed blocks. Lengths are clamped, so that no index computed from them is
// outside of the tensors, whatever their values are.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "shared/nsa.h"

namespace tessera::cuda {

/// The number of complete blocks in `tokens` tokens.
__device__ __forceinline__ int blocks_of(const CompressionParams& p, int tokens) {
  return tokens < p.length ? 0 : ptx::divide(tokens - p.length, p.stride) + 1;
}

__device__ __forceinline__ int sum_of_warp(int count, int most) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) count = min(count + __shfl_xor_sync(0xffffffffU, count, step), most);
  return count;
}

/// The number of rows of packed compressed keys before sequence `batch`; 0 for dense ones. Whole warps call this.
__device__ __forceinline__ int first_block_of(const CompressionParams& p, int batch) {
  if (p.cu_seqlens == nullptr) return 0;
  int count = 0;
  for (int b = static_cast<int>(threadIdx.x % 32); b < batch; b += 32) {
    const int tokens = find_extent(p.cu_seqlens, nullptr, b, p.seqlen, p.total).length;
    count = min(count + blocks_of(p, tokens), p.capacity);
  }
  return sum_of_warp(count, p.capacity);
}

struct CompressedSequence {
  Extent tokens;
  int first_block;  // row of the first block; 0 for dense ones
  int blocks;

  __device__ __forceinline__ CompressedSequence(const CompressionParams& p, int batch) {
    tokens = find_extent(p.cu_seqlens, nullptr, batch, p.seqlen, p.total);
    first_block = first_block_of(p, batch);
    blocks = blocks_of(p, tokens.length);
    if (p.cu_seqlens != nullptr) blocks = min(blocks, p.capacity - first_block);
  }
};

/// Address of column `column` of a head's row. `row` counts from the first row of `batch`.
template <Element type>
__device__ __forceinline__ char* row_at(const HeadRows& rows, int batch, i64 row, int head, int column) {
  return rows.data +
         (batch * rows.strides.batch + row * rows.strides.row + head * rows.strides.head + column) * bytes_of(type);
}

/// The head and the first of the `width` columns of a thread; `item` counts such columns over all heads.
template <int width>
struct HeadColumns {
  int head, column;
  bool exist;

  __device__ __forceinline__ HeadColumns(int item, int heads, int dim) {
    const int items = divide_up(dim, width);  // of a head
    head = item / items;
    column = (item - head * items) * width;
    exist = head < heads;
  }
};

}  // namespace tessera::cuda
