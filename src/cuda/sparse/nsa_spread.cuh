// SPDX-License-Identifier: Apache-2.0
// Gradients of tokens. A token's gradient is the sum of the gradients of all means that contain the token, added in a
// fixed order, divided by the length of a block.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/compressed.cuh"
#include "cuda/tile/row_vector.cuh"

namespace tessera::cuda {

template <SpreadConfig C>
struct NsaSpread {
  /// `pooled` of a side are the gradients that are read, `tokens` those that are written. gridDim is (tokens of a
  /// sequence / tokens of a thread block, columns of all heads / (32 · width), sequences · sides).
  static __device__ __forceinline__ void run(const PoolParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    const int batch = static_cast<int>(blockIdx.z) / p.sides;
    const PoolSide& side = p.side[static_cast<int>(blockIdx.z) - batch * p.sides];
    const CompressedSequence sequence(p.compression, batch);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const HeadColumns<C.width> columns(static_cast<int>(blockIdx.y) * 32 + lane, p.heads, side.dim);
    if (!columns.exist) return;
    const int begin = static_cast<int>(blockIdx.x) * SpreadConfig::tokens() + warp * SpreadConfig::kTokens;
    const int end = min(begin + SpreadConfig::kTokens, sequence.tokens.length);
    for (int token = begin; token < end; ++token) {
      RowVector<C.output, C.width> sum;
#pragma unroll
      for (int i = 0; i < C.width; ++i) sum.at[i] = 0.0F;
      const int last = min(sequence.blocks, ptx::divide(token, p.compression.stride) + 1);
      for (int block = blocks_of(p.compression, token); block < last; ++block) {
        RowVector<C.type, C.width> row;
        row.load(row_at<C.type>(side.pooled, batch, sequence.first_block + block, columns.head, columns.column));
#pragma unroll
        for (int i = 0; i < C.width; ++i) sum.at[i] += row.at[i];
      }
#pragma unroll
      for (int i = 0; i < C.width; ++i) sum.at[i] /= static_cast<float>(p.compression.length);
      sum.store(row_at<C.output>(side.tokens, batch, static_cast<i64>(sequence.tokens.first) + token, columns.head,
                                 columns.column));
    }
  }
};

}  // namespace tessera::cuda
