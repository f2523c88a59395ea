// SPDX-License-Identifier: Apache-2.0
// Sums of dQ in memory, to which the blocks of a pass by keys add. A tile of 64 rows is as long as its rows by the
// padded columns; two warpgroups have half the columns each, and of tile n of 8 columns a thread four numbers together.
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Where a thread, of 256, has its part of a tile of rows of a sequence; 512 floats lead from a tile of 8 columns to
/// the next.
template <int d>
__device__ __forceinline__ float* query_sums_of(const BwdParams& params, const Extent& q, int batch, int head, int tile,
                                                int thread) {
  const FwdParams& p = params.forward;
  // Packed sequences begin anywhere; with one tile more for each their tiles are apart.
  const int first = p.cu_seqlens_q != nullptr ? q.first / kSumRows + batch : batch * divide_up(p.seqlen_q, kSumRows);
  return params.query_sums.data + head * params.query_sums.head_stride + (i64{first} + tile) * (kSumRows * d) +
         thread / 128 * (kSumRows * d / 2) + thread % 128 * 4;
}

/// Zeros for the share that a block of FindRowValues has of a tile's sums: as many of 64 as it has rows.
template <RowValuesConfig C>
__device__ __forceinline__ void clear_query_sums(const BwdParams& params, const Extent& q, int batch, int head) {
  constexpr int shares = kSumRows / C.rows();
  const int tile = static_cast<int>(blockIdx.x) / shares;
  if (tile * kSumRows >= q.capacity) return;  // the next sequence's
  constexpr int floats = C.rows() * C.sums_d;
  const int share = static_cast<int>(blockIdx.x) % shares * floats;
  float* to = query_sums_of<C.sums_d>(params, q, batch, head, tile, 0) + share;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < floats; i += C.threads() * 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  }
}

/// dQ from its sums. Blocks of (tiles, heads, sequences).
template <QuerySumsConfig C>
struct StoreQuerySums {
  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    const FwdParams& p = params.forward;
    const int thread = static_cast<int>(threadIdx.x);
    const int tile = static_cast<int>(blockIdx.x);
    const int head = static_cast<int>(blockIdx.y);
    const int batch = static_cast<int>(blockIdx.z);
    const Extent q = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
    if (tile * kSumRows >= q.capacity) return;
    const float* from = query_sums_of<C.d>(params, q, batch, head, tile, thread);
    Accumulator<1, C.d / 16> dq;
#pragma unroll
    for (int n = 0; n < C.d / 16; ++n) {
      const float4 loaded = *reinterpret_cast<const float4*>(from + n * 512);
      dq.tile[0][n][0] = loaded.x;
      dq.tile[0][n][1] = loaded.y;
      dq.tile[0][n][2] = loaded.z;
      dq.tile[0][n][3] = loaded.w;
    }
    constexpr int bytes = bytes_of(C.gradient);
    const int column = thread / 128 * (C.d / 2);
    const int first = tile * kSumRows + thread % 128 / 32 * 16;
    const Strides& strides = params.dq_strides;
    char* to = static_cast<char*>(params.dq) +
               bytes * (batch * strides.batch + (i64{q.first} + first) * strides.row + head * strides.head + column);
    store_gradient<C.gradient>(
        dq, p.scale, p.d - column, params.accumulates, thread % 32,
        [&](int row) { return first + row < q.capacity ? to + bytes * strides.row * row : nullptr; },
        [&](int row) { return first + row < q.length; });
  }
};

}  // namespace tessera::cuda
