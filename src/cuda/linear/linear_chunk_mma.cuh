// SPDX-License-Identifier: Apache-2.0
// The products of a chunk (linear_chunk.cuh) by mma.sync. Warps work independently.
#pragma once

#include "cuda/linear/linear_chunk.cuh"

namespace tessera::cuda {

template <ChunkConfig C>
struct ChunkProducts<C, false> {
  using Block = LinearChunk<C>;
  using XTile = typename Block::XTile;
  using ZTile = typename Block::ZTile;
  using STile = typename Block::STile;

  static __device__ __forceinline__ void outputs(const Block& block, int chunks) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      block.begin(chunk);
      block.prefetch(chunk);
      outputs_of(block, chunk);
    }
  }

  static __device__ __forceinline__ void outputs_of(const Block& block, int chunk) {
    const int lane = Block::lane();
    const int warp = Block::thread() / 32;
    const u32 x = block.stage(chunk);
    const u32 y = keys_address<XTile>(x + XTile::bytes, lane);
    const u32 s = values_address<STile>(block.state(chunk), lane);
    const u32 rows = rows_address<XTile>(x, warp * 16, lane);
    typename Block::Out out;
    typename Block::Scores scores;
    out.clear();
    scores.clear();
#pragma unroll
    for (int k = 0; k < C.x / 16; ++k) {
      u32 a[1][4];
      load_rows<XTile>(a, rows, k);
      multiply_values<C.type, STile>(out, a, s, k);
#pragma unroll
      for (int n = 0; n < C.chunk / 16; ++n) {
        if (n > warp) break;  // later tokens
        u32 b[4];
        ptx::ldmatrix_x4(b, XTile::chunk_pair(y, k) + XTile::rows_below(n * 16));
        ptx::mma_m16n8k16<C.type>(scores.tile[0][2 * n], a[0], b[0], b[1]);
        ptx::mma_m16n8k16<C.type>(scores.tile[0][2 * n + 1], a[0], b[2], b[3]);
      }
    }
    block.decay(out);
    add_tokens(block, out, scores, x + 2 * XTile::bytes);
    __syncwarp();
    block.write(out, x, chunk);
  }

  /// out += (weights · scores) Z, the sum over the chunk's own tokens.
  static __device__ __forceinline__ void add_tokens(const Block& block, typename Block::Out& out,
                                                    const typename Block::Scores& scores, u32 z) {
    const u32 values = values_address<ZTile>(z, Block::lane());
#pragma unroll
    for (int n = 0; n < C.chunk / 16; ++n) {
      if (n > Block::thread() / 32) break;
      u32 p[1][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = 2 * n + i / 2;
        const float(&c)[4] = scores.tile[0][tile];
        const int first = i % 2 * 2;
        p[0][i] = ptx::pack<C.type>(c[first] * block.weight(tile, first), c[first + 1] * block.weight(tile, first + 1));
      }
      multiply_values<C.type, ZTile>(out, p, values, n);
    }
  }

  /// Updates S. Decayed Y has `terms` terms: several for an exact S, or one.
  template <int terms>
  static __device__ __forceinline__ void update(const Block& block, typename Block::State& s, int chunk) {
    const u32 y = keys_address<XTile>(block.stage(chunk) + XTile::bytes, Block::lane());
    const u32 z = values_address<ZTile>(block.stage(chunk) + 2 * XTile::bytes, Block::lane());
    const int count = min(block.length - chunk * C.chunk, C.chunk);
#pragma unroll
    for (int m = 0; m < Block::kRowTiles; ++m) {
      typename Block::Out sum;
      sum.clear();
      const u32 keys = XTile::chunk_pair(y, Block::row_tile(m));
#pragma unroll(Block::kUnrolled)
      for (int t = 0; t < C.chunk / 16; ++t) {
        u32 a[terms][4];
        block.template decayed<terms>(a, keys, t, count);
#pragma unroll
        for (int n = 0; n < C.tile / 16; ++n) {
          u32 b[4];
          ptx::ldmatrix_x4_transposed(b, ZTile::chunk_pair(z, n) + ZTile::rows_below(t * 16));
#pragma unroll
          for (int term = 0; term < terms; ++term) {
            ptx::mma_m16n8k16<C.type>(sum.tile[0][2 * n], a[term], b[0], b[1]);
            ptx::mma_m16n8k16<C.type>(sum.tile[0][2 * n + 1], a[term], b[2], b[3]);
          }
        }
      }
      Block::add(s, m, block.power[count], sum);
    }
  }
};

}  // namespace tessera::cuda
