// SPDX-License-Identifier: Apache-2.0
// Means of blocks of tokens. A thread block takes one block of tokens and 32 vectors of adjacent columns. Each of its
// warps sums a part of the tokens. If blocks of tokens do not overlap, each row is read once.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/compressed.cuh"
#include "cuda/tile/row_vector.cuh"

namespace tessera::cuda {

template <PoolConfig C>
struct NsaPool {
  using Vector = RowVector<C.type, C.width>;

  static __device__ __forceinline__ void run(const PoolParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    const int batch = static_cast<int>(blockIdx.z) / p.sides;
    const PoolSide& side = p.side[static_cast<int>(blockIdx.z) - batch * p.sides];
    if (batch >= p.compression.batch) {  // there is no sequence at all
      if (p.cu_blocks != nullptr && threadIdx.x == 0) p.cu_blocks[0] = 0;
      return;
    }
    const CompressedSequence sequence(p.compression, batch);
    const auto block = static_cast<int>(blockIdx.x);
    if (p.cu_blocks != nullptr && block == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      p.cu_blocks[batch] = sequence.first_block;
      if (batch + 1 == p.compression.batch) p.cu_blocks[batch + 1] = sequence.first_block + sequence.blocks;
    }
    if (block >= sequence.blocks) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const HeadColumns<C.width> columns(static_cast<int>(blockIdx.y) * 32 + lane, p.heads, side.dim);
    Vector sum;
#pragma unroll
    for (int i = 0; i < C.width; ++i) sum.at[i] = 0.0F;
    if (columns.exist) {
      const i64 first = sequence.tokens.first + static_cast<i64>(block) * p.compression.stride.value;
      add_tokens(sum, side.tokens, batch, first, p.compression.length, columns);
    }
    add_warps(sum, lane);
    if (threadIdx.x >= 32 || !columns.exist) return;
    RowVector<C.output, C.width> mean;
#pragma unroll
    for (int i = 0; i < C.width; ++i) mean.at[i] = sum.at[i] / static_cast<float>(p.compression.length);
    mean.store(row_at<C.output>(side.pooled, batch, sequence.first_block + block, columns.head, columns.column));
  }

  static __device__ __forceinline__ void add_tokens(Vector& sum, const HeadRows& tokens, int batch, i64 first,
                                                    int length, const HeadColumns<C.width>& columns) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const char* from = row_at<C.type>(tokens, batch, first + warp, columns.head, columns.column);
    const i64 step = PoolConfig::kWarps * tokens.strides.row * bytes_of(C.type);
#pragma unroll 8
    for (int token = warp; token < length; token += PoolConfig::kWarps, from += step) {
      Vector row;
      row.load(from);
#pragma unroll
      for (int i = 0; i < C.width; ++i) sum.at[i] += row.at[i];
    }
  }

  /// Adds the sums of all warps to those of the first.
  static __device__ __forceinline__ void add_warps(Vector& sum, int lane) {
    __shared__ float parts[PoolConfig::kWarps - 1][C.width][32];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp > 0) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) parts[warp - 1][i][lane] = sum.at[i];
    }
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 0; other < PoolConfig::kWarps - 1; ++other) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) sum.at[i] += parts[other][i][lane];
    }
  }
};

}  // namespace tessera::cuda
