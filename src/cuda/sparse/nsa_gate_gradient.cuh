// SPDX-License-Identifier: Apache-2.0
// Gradients of the branches and the gates: dO_x = g_x · dO, dg_x = dO · O_x. With sigmoid gates also those of q and the
// gates' weights: e_x = dg_x · g_x · (1 − g_x), dq = Σ e_x · w_x, dw_x = Σ e_x · q. A thread block takes consecutive
// rows of one head, so that its threads add up dw in registers. It stores its sums for NsaGateSum.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/gate_rows.cuh"

namespace tessera::cuda {

/// gridDim is (parts of the rows of all sequences, heads).
template <GateConfig C>
struct NsaGateGradient {
  static constexpr bool kSigmoid = C.source == GateSource::sigmoid;
  using QueryVector = RowVector<C.q, C.width>;

  const GateParams& p;
  int first_column;
  float dweight[kGates][C.chunks][C.width];

  static __device__ __forceinline__ void run(const GateParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    NsaGateGradient part{p, static_cast<int>(threadIdx.x) % C.lanes * C.width, {}};
    const int rows = rows_in_use(p);
    const int group = static_cast<int>(threadIdx.x) / C.lanes;
    const int begin = static_cast<int>(blockIdx.x) * p.part_rows;
    const int end = min(begin + p.part_rows, rows);
    // All groups of a warp take part in every iteration, because they share shuffles.
    for (int first = begin; first < end; first += C.groups()) part.take(first + group, first + group < end);
    if constexpr (kSigmoid) part.leave_weights(group);
  }

  __device__ __forceinline__ void take(int of_all, bool exists) {
    const GateRow row = find_row(p, of_all, static_cast<int>(blockIdx.y));
    QueryVector q[C.chunks];
    float gates[kGates] = {};
    if constexpr (kSigmoid) {
      find_sigmoids(gates, q, row, exists);
    } else {
      Gates<C>::find_given(gates, p, row, exists);
    }
    float gradients[kGates] = {};
    for (int column = first_column; exists && column < p.dv; column += C.columns()) {
      write_branches(gradients, row, column, gates);
    }
    Gates<C>::add_lanes(gradients);
    if constexpr (C.source == GateSource::given) {
      if (exists && first_column == 0) {
#pragma unroll
        for (int x = 0; x < kGates; ++x) p.dgates[row.at(p.dgate_strides) + x] = gradients[x];
      }
    }
    if constexpr (kSigmoid) {
#pragma unroll
      for (int x = 0; x < kGates; ++x) gradients[x] *= gates[x] * (1.0F - gates[x]);
      if (exists) add_row(gradients, q, row);
    }
  }

  __device__ __forceinline__ void find_sigmoids(float (&gates)[kGates], QueryVector (&q)[C.chunks], const GateRow& row,
                                                bool exists) const {
#pragma unroll
    for (int chunk = 0; chunk < C.chunks; ++chunk) {
      const int column = first_column + chunk * C.columns();
      if (!exists || column >= p.d) continue;
      q[chunk].load(p.q + (row.at(p.q_strides) + column) * bytes_of(C.q));
      Gates<C>::add_logits(gates, p, row.head, column, q[chunk]);
    }
    Gates<C>::add_lanes(gates);
#pragma unroll
    for (float& gate : gates) gate = Gates<C>::sigmoid(gate);
  }

  /// Writes dO_x, and adds dO · O_x to `sum`.
  __device__ __forceinline__ void write_branches(float (&sum)[kGates], const GateRow& row, int column,
                                                 const float (&gates)[kGates]) const {
    RowVector<C.o, C.width> dout;
    RowVector<C.v, C.width> branch[kGates];
    dout.load(p.o + (row.at(p.o_strides) + column) * bytes_of(C.o));
#pragma unroll
    for (int x = 0; x < kGates; ++x) {
      branch[x].load(p.branches + (x * p.branch + row.at(p.branch_strides) + column) * bytes_of(C.v));
    }
#pragma unroll
    for (int x = 0; x < kGates; ++x) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) {
        sum[x] += dout.at[i] * branch[x].at[i];
        branch[x].at[i] = gates[x] * dout.at[i];
      }
      branch[x].store(p.dbranches + (x * p.dbranch + row.at(p.dbranch_strides) + column) * bytes_of(C.v));
    }
  }

  /// Adds a row's share to dw, and writes its dq.
  __device__ __forceinline__ void add_row(const float (&e)[kGates], const QueryVector (&q)[C.chunks],
                                          const GateRow& row) {
#pragma unroll
    for (int chunk = 0; chunk < C.chunks; ++chunk) {
      const int column = first_column + chunk * C.columns();
      if (column >= p.d) continue;
      QueryVector dq;
#pragma unroll
      for (int i = 0; i < C.width; ++i) dq.at[i] = 0.0F;
#pragma unroll
      for (int x = 0; x < kGates; ++x) {
        const QueryVector w = Gates<C>::weight(p, row.head, x, column);
#pragma unroll
        for (int i = 0; i < C.width; ++i) {
          dq.at[i] += e[x] * w.at[i];
          dweight[x][chunk][i] += e[x] * q[chunk].at[i];
        }
      }
      dq.store(p.dq + (row.at(p.dq_strides) + column) * bytes_of(C.q));
    }
  }

  /// Adds the sums of the groups in a fixed order, and writes the result as the sums of this part.
  __device__ __forceinline__ void leave_weights(int group) const {
    __shared__ float sums[kGates][C.chunks * C.columns()];
    for (int turn = 0; turn < C.groups(); ++turn) {
      if (turn == group) {
#pragma unroll
        for (int x = 0; x < kGates; ++x) {
#pragma unroll
          for (int chunk = 0; chunk < C.chunks; ++chunk) {
#pragma unroll
            for (int i = 0; i < C.width; ++i) {
              float& sum = sums[x][first_column + chunk * C.columns() + i];
              sum = turn == 0 ? dweight[x][chunk][i] : sum + dweight[x][chunk][i];
            }
          }
        }
      }
      __syncthreads();
    }
    const i64 part = static_cast<i64>(blockIdx.x) * p.heads.value + blockIdx.y;
    float* to = p.partial_weights + part * kGates * p.d;
    for (int i = static_cast<int>(threadIdx.x); i < kGates * p.d; i += C.threads()) {
      to[i] = sums[i / p.d][i % p.d];
    }
  }
};

}  // namespace tessera::cuda
