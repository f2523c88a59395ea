// SPDX-License-Identifier: Apache-2.0
// The kernel after a pass with Gradients::all, which scales, rounds and stores the sums of dQ.
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/backward/query_sums.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// The grid is (tiles of sums, heads or groups of heads_a_tile, sequences).
template <QuerySumsConfig C>
struct StoreQuerySums {
  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    const FwdParams& p = params.forward;
    const int thread = static_cast<int>(threadIdx.x);
    const int tile = static_cast<int>(blockIdx.x);
    const int head = static_cast<int>(blockIdx.y) * C.heads_a_tile;
    const int batch = static_cast<int>(blockIdx.z);
    const Extent q = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
    if (tile * (kSumRows / C.heads_a_tile) >= q.capacity) return;
    const float* from = query_sums_of<C.d, C.vectors, C.heads_a_tile>(params, q, batch, head, tile, thread);
    bool has_sums = true;
    if constexpr (C.ordered) {
      has_sums = params.query_sums.added[sum_tile_of(params, q, batch, head, tile)] != 0;
    }
    constexpr int columns = sum_columns(C.d);
    const int column = thread / 128 * columns;
    Accumulator<1, columns / 8> dq;
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      if (n * 8 >= C.d - columns && column > 0) break;
      float(&to)[4] = dq.tile[0][n];
      if constexpr (C.vectors) {
        const float4 loaded = *reinterpret_cast<const float4*>(from + n * 512);
        to[0] = loaded.x;
        to[1] = loaded.y;
        to[2] = loaded.z;
        to[3] = loaded.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = from[n * 512 + e * 128];
      }
    }
    constexpr int bytes = bytes_of(C.gradient);
    const int first = tile * kSumRows + thread % 128 / 32 * 16;
    const Strides& strides = params.dq_strides;
    char* to = static_cast<char*>(params.dq) +
               bytes * (batch * strides.batch + i64{q.first} * strides.row + head * strides.head + column);
    const auto query_of = [first](int row) { return (first + row) / C.heads_a_tile; };
    store_gradient<C.gradient>(
        dq, p.scale, p.d - column, params.accumulates, thread % 32,
        [&](int row) {
          const i64 at = query_of(row) * strides.row + (first + row) % C.heads_a_tile * strides.head;
          return query_of(row) < q.capacity ? to + bytes * at : nullptr;
        },
        [&](int row) { return has_sums && query_of(row) < q.length; });
  }
};

}  // namespace tessera::cuda
