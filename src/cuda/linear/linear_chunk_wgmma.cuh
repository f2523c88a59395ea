// SPDX-License-Identifier: Apache-2.0
// The products of a chunk (linear_chunk.cuh) by wgmma: one warpgroup for the outputs, one for the state.
#pragma once

#include "cuda/linear/linear_chunk.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_wgmma.cuh"

namespace tessera::cuda {

template <ChunkConfig C>
struct ChunkProducts<C, true> {
  using Block = LinearChunk<C>;
  using XTile = typename Block::XTile;
  using ZTile = typename Block::ZTile;
  using STile = typename Block::STile;
  static constexpr int kOutputWarps = 1;  // number of their barrier
  static_assert(C.chunk == 64 && C.output_warps() == 4 && C.kUpdateWarps == 4);

  static __device__ __forceinline__ void outputs(const Block& block, int chunks) {
    // The weights of the chunk's own tokens are the same in every chunk.
    float weight[C.chunk / 8][4];
#pragma unroll
    for (int n = 0; n < C.chunk / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weight[n][i] = block.weight(n, i);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      block.begin(chunk);
      const u32 x = ptx::uniform(block.stage(chunk));
      typename Block::Out out;
      typename Block::Scores scores;
      begin_scores<C.type, XTile, XTile>(scores, x, x + XTile::bytes);
      begin_shared<C.type, XTile, STile>(out, x, ptx::uniform(block.state(chunk)));
      block.prefetch(chunk);
      ptx::wgmma_wait<1>();
      settle(scores);
      u32 p[C.chunk / 16][4];
#pragma unroll
      for (int n = 0; n < C.chunk / 8; ++n) {
        const float(&c)[4] = scores.tile[0][n];
        p[n / 2][n % 2 * 2] = ptx::pack<C.type>(c[0] * weight[n][0], c[1] * weight[n][1]);
        p[n / 2][n % 2 * 2 + 1] = ptx::pack<C.type>(c[2] * weight[n][2], c[3] * weight[n][3]);
      }
      ptx::wgmma_wait<0>();
      settle(out);
      block.decay(out);
      begin_outputs<C.type, ZTile>(out, p, x + 2 * XTile::bytes);
      ptx::wgmma_wait<0>();
      settle(out);
      ptx::barrier_sync(kOutputWarps, C.output_warps() * 32);  // all warps have read X
      block.write(out, x, chunk);
    }
  }

  /// Updates S. Decayed Y has `terms` terms: several for an exact S, or one. With one, registers suffice to issue the
  /// products of all row tiles before the wait.
  template <int terms>
  static __device__ __forceinline__ void update(const Block& block, typename Block::State& s, int chunk) {
    const u32 y = keys_address<XTile>(block.stage(chunk) + XTile::bytes, Block::lane());
    const u32 z = ptx::uniform(block.stage(chunk) + 2 * XTile::bytes);
    const int count = min(block.length - chunk * C.chunk, C.chunk);
    const float decay = block.power[count];
    typename Block::Out sum[Block::kRowTiles];
#pragma unroll
    for (int m = 0; m < Block::kRowTiles; ++m) {
      u32 a[C.chunk / 16][terms][4];
#pragma unroll
      for (int t = 0; t < C.chunk / 16; ++t) {
        block.template decayed<terms>(a[t], XTile::chunk_pair(y, Block::row_tile(m)), t, count);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int t = 0; t < C.chunk / 16; ++t) {
#pragma unroll
        for (int term = 0; term < terms; ++term) {
          ptx::Wgmma<C.tile, C.type>::from_registers(&sum[m].tile[0][0][0], a[t][term], Descriptor<ZTile>::rows(z, t),
                                                     t + term > 0);
        }
      }
      ptx::wgmma_commit();
      if constexpr (terms > 1) finish(s, m, decay, sum[m]);
    }
    if constexpr (terms == 1) {
#pragma unroll
      for (int m = 0; m < Block::kRowTiles; ++m) finish(s, m, decay, sum[m]);
    }
  }

  static __device__ __forceinline__ void finish(typename Block::State& s, int m, float decay,
                                                typename Block::Out& sum) {
    ptx::wgmma_wait<0>();
    settle(sum);
    Block::add(s, m, decay, sum);
  }
};

}  // namespace tessera::cuda
