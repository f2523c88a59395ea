// SPDX-License-Identifier: Apache-2.0
// Merges partial results over disjoint keys (flash decoding; Dao et al. 2023):
//
//     L = log Σ_p exp(L_p)        o = Σ_p exp(L_p − L) · o_p,  where a sink s adds exp(s) to the divisor of o
//
// 16 lanes take one (row, head) and have 8 columns each.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/combine.h"

namespace tessera::cuda {

template <CombineConfig C>
struct Combine {
  /// The LSE is stored last, because it may overwrite that of a part.
  static __device__ __forceinline__ void run(const CombineParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    float lse = 0.0F;
    float* lse_at = nullptr;
    merge(p, lse, lse_at);
    __syncthreads();
    if (lse_at != nullptr) *lse_at = lse;
  }

  /// `lse_at`: where this thread must store `lse`; null if it must not.
  static __device__ __forceinline__ void merge(const CombineParams& p, float& lse, float*& lse_at) {
    const int thread = static_cast<int>(threadIdx.x);
    const int index = static_cast<int>(blockIdx.x) * C.rows_a_block() + thread / C.lanes_a_row();
    const int batch = static_cast<int>(blockIdx.y);
    const int row = ptx::divide(index, p.heads);
    const int head = index - row * static_cast<int>(p.heads.value);
    const Extent rows = find_extent(p.cu_seqlens_q, nullptr, batch, p.seqlen_q, p.total_q);
    if (row >= rows.capacity) return;
    const auto offset = [&](const Strides& strides) {
      return batch * strides.batch + (rows.first + row) * strides.row + head * strides.head;
    };
    const float* lse_parts = p.lse_parts + offset(p.lse_parts_strides);
    float highest = -kInfinity;  // fmaxf ignores NaN, but the sum becomes NaN
    for (int part = 0; part < p.parts; ++part) highest = fmaxf(highest, lse_parts[part * p.lse_part]);
    const auto has_keys = [&](int part) { return lse_parts[part * p.lse_part] != -kInfinity; };
    const auto weight_of = [&](int part) { return ptx::exp2((lse_parts[part * p.lse_part] - highest) * kLog2E); };
    float sum = 0.0F;
    for (int part = 0; part < p.parts; ++part) sum += has_keys(part) ? weight_of(part) : 0.0F;
    const bool empty = sum == 0.0F;
    float share = sum;
    if (p.sinks != nullptr && !empty) share += ptx::exp2((p.sinks[head * p.sinks_stride] - highest) * kLog2E);
    const float inverse = empty ? 0.0F : ptx::reciprocal(share);
    const int lane = thread % C.lanes_a_row();
    if (p.lse != nullptr && lane == 0) {
      lse = empty ? -kInfinity : highest + ptx::log2(sum) * kLn2;
      lse_at = p.lse + offset(p.lse_strides);
    }
    const char* from = static_cast<const char*>(p.o_parts) + offset(p.o_parts_strides) * bytes_of(C.parts);
    char* to = static_cast<char*>(p.o) + offset(p.o_strides) * bytes_of(C.output);
    for (int column = lane * 8; column < p.dv; column += C.lanes_a_row() * 8) {
      RowVector<C.output, 8> merged{};
      for (int part = 0; part < p.parts; ++part) {
        if (!has_keys(part)) continue;  // its output is undefined
        const float weight = weight_of(part) * inverse;
        RowVector<C.parts, 8> one;
        one.load(from + (part * p.o_part + column) * bytes_of(C.parts));
#pragma unroll
        for (int i = 0; i < 8; ++i) merged.at[i] += weight * one.at[i];
      }
      merged.store(to + column * bytes_of(C.output));
    }
  }
};

}  // namespace tessera::cuda
