// SPDX-License-Identifier: Apache-2.0
// The sums of dQ in memory, to which the blocks of a key pass add. A tile has 64 rows by the padded columns d, of which
// the first of two warpgroups has sum_columns(d). Element e of a thread, of its n-th tile of 8 columns, is at
//
//     thread / 128 · 64·sum_columns(d) + n · 512 + thread % 128 · 4 + e    if the TMA adds
//     thread / 128 · 64·sum_columns(d) + n · 512 + e · 128 + thread % 128  if threads add single floats
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Returns the index of a sequence's tile of rows among all tiles of sums. `head`: a query head; with packed rows, any
/// of the heads of the tile (BwdConfig::heads_a_tile).
__device__ __forceinline__ i64 sum_tile_of(const BwdParams& params, const Extent& q, int batch, int head, int tile,
                                           int heads_a_tile = 1) {
  const FwdParams& p = params.forward;
  // Packed sequences begin at any row. One extra tile for each keeps their tiles apart: for a sequence of length L that
  // begins at f, floor(f / 64) + ceil(L / 64) is at most floor((f + L) / 64) + 1.
  const int queries = kSumRows / heads_a_tile;  // queries of a tile
  const int first = p.cu_seqlens_q != nullptr ? q.first / queries + batch : batch * divide_up(p.seqlen_q, queries);
  return head / heads_a_tile * params.query_sums.head_tiles + first + tile;
}

/// Returns the address of what a thread, of 256, has of a tile of sums. Its tiles of 8 columns are 512 floats apart.
/// `vectors`: selects the first of the two layouts above.
template <int d, bool vectors = true, int heads_a_tile = 1>
__device__ __forceinline__ float* query_sums_of(const BwdParams& params, const Extent& q, int batch, int head, int tile,
                                                int thread) {
  return params.query_sums.data + sum_tile_of(params, q, batch, head, tile, heads_a_tile) * (kSumRows * d) +
         thread / 128 * (kSumRows * sum_columns(d)) + thread % 128 * (vectors ? 4 : 1);
}

/// Clears the share that a block of FindRowValues has of a tile of sums: C.rows() of its 64 rows. If rows are packed,
/// the blocks of the packed heads divide the tiles among themselves.
template <RowValuesConfig C>
__device__ __forceinline__ void clear_query_sums(const BwdParams& params, const Extent& q, int batch, int head) {
  constexpr int shares = kSumRows / C.rows();
  constexpr int heads = C.heads_a_tile;
  const int tile = static_cast<int>(head % heads * gridDim.x + blockIdx.x) / shares;
  if (tile * (kSumRows / heads) >= q.capacity) return;  // the tile belongs to the next sequence
  const int floats = C.rows() * params.query_sums.d;
  const int share = static_cast<int>(blockIdx.x) % shares * floats;
  float* to = params.query_sums.data +
              sum_tile_of(params, q, batch, head, tile, heads) * (kSumRows * params.query_sums.d) + share;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < floats; i += C.threads() * 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  }
}

/// Clears the count of a tile if the block has its first row. The sums need no zeros: the first share is stored, and
/// others are added to it.
template <RowValuesConfig C>
__device__ __forceinline__ void clear_added(const BwdParams& params, const Extent& q, int batch, int head) {
  const int row = static_cast<int>(blockIdx.x) * C.rows();
  if (row % kSumRows != 0 || row >= q.capacity || threadIdx.x != 0) return;
  params.query_sums.added[sum_tile_of(params, q, batch, head, row / kSumRows)] = 0;
}

}  // namespace tessera::cuda
