// SPDX-License-Identifier: Apache-2.0
// The kernel before the passes, which computes RowValues of all query rows and the rows' shares of dsink, and the
// kernel that adds up dsink. Sums have a fixed order.
#pragma once

#include "cuda/attention/backward/query_sums.cuh"
#include "cuda/attention/kv/sequence.cuh"
#include "cuda/attention/softmax/residual.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Returns the index of a sequence's first row in the RowValues of a head.
__device__ __forceinline__ i64 first_value(const FwdParams& p, const Extent& q, int batch) {
  return p.cu_seqlens_q != nullptr ? i64{q.first} : static_cast<i64>(batch) * p.seqlen_q;
}

/// RowValues of one row.
struct RowValue {
  float lse = kInfinity;
  float delta = 0.0F;
  float weight = 1.0F;
};

/// Reads a float of RowValues from L2, because L1 is not coherent: a block of the key pass may begin before it has
/// waited for any kernel (PassOverlap).
__device__ __forceinline__ float read_value(const float* from) { return __ldcg(from); }

/// Reads the values of a row of a sequence.
template <BwdConfig B, class Work>
__device__ __forceinline__ RowValue row_value(const BwdParams& params, const Work& work, int row) {
  if (row >= work.sequence.q.length) return {};
  const RowValues& values = params.values;
  const i64 at = work.block.head * values.rows + first_value(params.forward, work.sequence.q, work.block.batch) + row;
  RowValue value{read_value(values.lse + at), read_value(values.delta + at), 1.0F};
  if constexpr (B.sink) value.weight = read_value(values.weight + at);
  return value;
}

/// The grid is (blocks of rows, heads, sequences); `lanes` neighbouring lanes share a row.
template <RowValuesConfig C>
struct FindRowValues {
  static constexpr int lanes = C.lanes();

  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    const FwdParams& p = params.forward;
    const int batch = static_cast<int>(blockIdx.z);
    const int head = static_cast<int>(blockIdx.y);
    const int row = static_cast<int>(blockIdx.x) * C.rows() + static_cast<int>(threadIdx.x) / lanes;
    const Extent q = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
    if constexpr (C.cleared_rows > 0) clear_query_sums<C>(params, q, batch, head);
    if constexpr (C.counts_sums) clear_added<C>(params, q, batch, head);
    if constexpr (C.clears) clear_words(params);
    float dsink = 0.0F;
    // A row behind the end repeats the last one, because all lanes take part in the shuffles.
    if (q.length > 0) dsink = find(params, q, batch, head, min(row, q.length - 1), row < q.length);
    if constexpr (C.sink) add_up(params, batch, head, dsink);
  }

 private:
  static __device__ __forceinline__ void clear_words(const BwdParams& params) {
    const u32 block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const i64 blocks = i64{gridDim.z} * gridDim.y * gridDim.x;
    for (i64 i = i64{block} * C.threads() + threadIdx.x; i < params.cleared_count; i += blocks * C.threads()) {
      params.cleared_words[i] = 0;
    }
  }

  template <class T>
  static __device__ __forceinline__ const T* at(const T* tensor, int bytes, const Strides& strides, const Extent& q,
                                                int batch, int head, int row) {
    const i64 offset = batch * strides.batch + (q.first + i64{row}) * strides.row + head * strides.head;
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(tensor) + offset * bytes);
  }

  /// Stores the RowValues of a row. Returns its share of dsink in its first lane, and 0 in the others.
  static __device__ __forceinline__ float find(const BwdParams& params, const Extent& q, int batch, int head, int row,
                                               bool is_row) {
    const FwdParams& p = params.forward;
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    constexpr int bytes = bytes_of(C.type);
    const char* o = at(static_cast<const char*>(p.o), bytes, p.o_strides, q, batch, head, row);
    const char* dout = at(static_cast<const char*>(params.dout), bytes, params.dout_strides, q, batch, head, row);
    float product = 0.0F;
    if (lane * 8 < p.dv) {
      RowVector<C.type, 8> a, b;
      a.load(o + lane * 8 * bytes);
      b.load(dout + lane * 8 * bytes);
      if constexpr (C.residual) {
        const auto& kept = static_cast<const ResidualBwdParams&>(params);
        add_residual<C.type>(a.at, at(kept.o_residual, 1, kept.o_residual_strides, q, batch, head, row) + lane * 8);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) product = __fmaf_rn(a.at[i], b.at[i], product);
    }
#pragma unroll
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      product += __shfl_xor_sync(0xffffffffU, product, distance);
    }
    if (lane != 0 || !is_row) return 0.0F;
    const float lse = *at(p.lse, 4, p.lse_strides, q, batch, head, row);
    const bool empty = lse == -kInfinity;
    const float dlse = params.dlse != nullptr ? *at(params.dlse, 4, params.dlse_strides, q, batch, head, row) : 0.0F;
    float weight = 1.0F;
    float dsink = 0.0F;
    if constexpr (C.sink) {
      const float sink = p.sinks[head * p.sinks_stride];
      weight = 1.0F / (1.0F + expf(sink - lse));
      if (!empty) dsink = -product / (1.0F + expf(lse - sink));
    }
    const RowValues& values = params.values;
    const i64 to = head * values.rows + first_value(p, q, batch) + row;
    values.lse[to] = empty ? kInfinity : lse * kLog2E;
    values.delta[to] = empty ? 0.0F : __fmaf_rn(weight, product, -dlse);
    if constexpr (C.sink) values.weight[to] = empty ? 1.0F : weight;
    return dsink;
  }

  static __device__ __forceinline__ void add_up(const BwdParams& params, int batch, int head, float share) {
    __shared__ float sums[C.threads()];
    const int thread = static_cast<int>(threadIdx.x);
    sums[thread] = share;
    for (int distance = C.threads() / 2; distance > 0; distance /= 2) {
      __syncthreads();
      if (thread < distance) sums[thread] += sums[thread + distance];
    }
    if (thread != 0) return;
    const i64 part = static_cast<i64>(batch) * gridDim.x + blockIdx.x;
    params.dsink_parts[static_cast<i64>(head) * params.dsink_part_count + part] = sums[0];
  }
};

/// Adds up dsink of a head from its parts; there is one block for each head.
struct SumSinks {
  static constexpr int threads = 256;

  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    __shared__ double sums[threads];
    const int thread = static_cast<int>(threadIdx.x);
    const float* parts = params.dsink_parts + static_cast<i64>(blockIdx.x) * params.dsink_part_count;
    double sum = 0.0;
    for (int i = thread; i < params.dsink_part_count; i += threads) sum += static_cast<double>(parts[i]);
    sums[thread] = sum;
    for (int distance = threads / 2; distance > 0; distance /= 2) {
      __syncthreads();
      if (thread < distance) sums[thread] += sums[thread + distance];
    }
    if (thread != 0) return;
    float& to = params.dsink[blockIdx.x * params.dsink_stride];
    to = static_cast<float>(sums[0] + (params.accumulates ? static_cast<double>(to) : 0.0));
  }
};

}  // namespace tessera::cuda
