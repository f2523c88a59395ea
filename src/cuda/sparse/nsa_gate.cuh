// SPDX-License-Identifier: Apache-2.0
// O = Σ g_x · O_x over the branches of native sparse attention. A group of lanes computes each row of a head.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/gate_rows.cuh"

namespace tessera::cuda {

/// gridDim is (rows of all sequences · heads / groups of lanes).
template <GateConfig C>
struct NsaGate {
  static __device__ __forceinline__ void run(const GateParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    const int item = static_cast<int>(blockIdx.x * C.groups() + threadIdx.x / C.lanes);
    const int of_all = ptx::divide(item, p.heads);
    const bool exists = of_all < rows_in_use(p);
    const GateRow row = find_row(p, of_all, item - of_all * static_cast<int>(p.heads.value));
    const int first = static_cast<int>(threadIdx.x) % C.lanes * C.width;
    float gates[kGates] = {};
    if constexpr (C.source == GateSource::sigmoid) {
      for (int column = first; exists && column < p.d; column += C.columns()) {
        RowVector<C.q, C.width> q;
        q.load(p.q + (row.at(p.q_strides) + column) * bytes_of(C.q));
        Gates<C>::add_logits(gates, p, row.head, column, q);
      }
      Gates<C>::add_lanes(gates);
#pragma unroll
      for (float& gate : gates) gate = Gates<C>::sigmoid(gate);
    } else {
      Gates<C>::find_given(gates, p, row, exists);
    }
    for (int column = first; exists && column < p.dv; column += C.columns()) write(p, row, column, gates);
  }

  static __device__ __forceinline__ void write(const GateParams& p, const GateRow& row, int column,
                                               const float (&gates)[kGates]) {
    RowVector<C.v, C.width> branch[kGates];
#pragma unroll
    for (int x = 0; x < kGates; ++x) {
      branch[x].load(p.branches + (x * p.branch + row.at(p.branch_strides) + column) * bytes_of(C.v));
    }
    RowVector<C.o, C.width> sum;
#pragma unroll
    for (int i = 0; i < C.width; ++i) {
      sum.at[i] = 0.0F;
      // A branch with a gate of 0 may hold anything, even NaN.
#pragma unroll
      for (int x = 0; x < kGates; ++x) sum.at[i] += gates[x] == 0.0F ? 0.0F : gates[x] * branch[x].at[i];
    }
    sum.store(p.o + (row.at(p.o_strides) + column) * bytes_of(C.o));
  }
};

}  // namespace tessera::cuda
