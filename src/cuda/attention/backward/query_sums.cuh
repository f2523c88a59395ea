// SPDX-License-Identifier: Apache-2.0
// Sums of dQ in memory, to which the blocks of a pass by keys add. A tile of 64 rows is as long as its rows by the
// padded columns d, of which the first of two warpgroups has sum_columns(d); element e of a thread, of tile n of 8
// columns, lies at
//
//     thread / 128 · 64·sum_columns(d) + n · 512 + thread % 128 · 4 + e    where TMA adds
//     thread / 128 · 64·sum_columns(d) + n · 512 + e · 128 + thread % 128  where threads add, a number each
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Which of all tiles of sums a tile of a sequence's rows is. `head`: a query head, or one of `heads_a_tile` whose rows
/// are packed (BwdConfig).
__device__ __forceinline__ i64 sum_tile_of(const BwdParams& params, const Extent& q, int batch, int head, int tile,
                                           int heads_a_tile = 1) {
  const FwdParams& p = params.forward;
  // Packed sequences begin anywhere; with one tile more for each their tiles are apart: of a sequence at f of length L
  // floor(f / 64) + ceil(L / 64) is at most floor((f + L) / 64) + 1.
  const int queries = kSumRows / heads_a_tile;  // of a tile
  const int first = p.cu_seqlens_q != nullptr ? q.first / queries + batch : batch * divide_up(p.seqlen_q, queries);
  return head / heads_a_tile * params.query_sums.head_tiles + first + tile;
}

/// Where a thread, of 256, has its part of a tile of rows of a sequence; 512 floats lead from a tile of 8 columns to
/// the next. `vectors`: of the first of the two orders above.
template <int d, bool vectors = true, int heads_a_tile = 1>
__device__ __forceinline__ float* query_sums_of(const BwdParams& params, const Extent& q, int batch, int head, int tile,
                                                int thread) {
  return params.query_sums.data + sum_tile_of(params, q, batch, head, tile, heads_a_tile) * (kSumRows * d) +
         thread / 128 * (kSumRows * sum_columns(d)) + thread % 128 * (vectors ? 4 : 1);
}

/// Zeros for the share that a block of FindRowValues has of a tile's sums: as many of 64 as it has rows. Where rows of
/// heads are packed, the blocks of these heads share their tiles.
template <RowValuesConfig C>
__device__ __forceinline__ void clear_query_sums(const BwdParams& params, const Extent& q, int batch, int head) {
  constexpr int shares = kSumRows / C.rows();
  constexpr int heads = C.heads_a_tile;
  const int tile = static_cast<int>(head % heads * gridDim.x + blockIdx.x) / shares;
  if (tile * (kSumRows / heads) >= q.capacity) return;  // the next sequence's
  const int floats = C.rows() * params.query_sums.d;
  const int share = static_cast<int>(blockIdx.x) % shares * floats;
  float* to = params.query_sums.data +
              sum_tile_of(params, q, batch, head, tile, heads) * (kSumRows * params.query_sums.d) + share;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < floats; i += C.threads() * 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  }
}

/// Likewise a zero for the count of a tile, where the block's rows begin one: its sums are stored before any are added.
template <RowValuesConfig C>
__device__ __forceinline__ void clear_added(const BwdParams& params, const Extent& q, int batch, int head) {
  const int row = static_cast<int>(blockIdx.x) * C.rows();
  if (row % kSumRows != 0 || row >= q.capacity || threadIdx.x != 0) return;
  params.query_sums.added[sum_tile_of(params, q, batch, head, row / kSumRows)] = 0;
}

}  // namespace tessera::cuda
