// SPDX-License-Identifier: Apache-2.0
// The gates of a row of a head. A group of lanes of a warp shares the columns of the row.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/nsa_gate.h"

namespace tessera::cuda {

/// A row of a head; at() is its offset in elements.
struct GateRow {
  int batch, row, head;

  __device__ __forceinline__ i64 at(const Strides& strides) const {
    return batch * strides.batch + row * strides.row + head * strides.head;
  }
};

/// The number of rows of all sequences; for packed sequences, of those in use.
__device__ __forceinline__ int rows_in_use(const GateParams& p) {
  return p.cu_seqlens != nullptr ? clamp(p.cu_seqlens[p.batch], 0, p.all_rows) : p.all_rows;
}

/// Finds row `row`, counted over all sequences.
__device__ __forceinline__ GateRow find_row(const GateParams& p, int row, int head) {
  if (p.cu_seqlens != nullptr) return {0, row, head};
  const int batch = ptx::divide(row, p.rows);
  return {batch, row - batch * static_cast<int>(p.rows.value), head};
}

template <GateConfig C>
struct Gates {
  using QueryVector = RowVector<C.q, C.width>;

  /// Sums each number over the lanes of a row. Whole warps call this.
  static __device__ __forceinline__ void add_lanes(float (&sum)[kGates]) {
#pragma unroll
    for (int step = C.lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int x = 0; x < kGates; ++x) sum[x] += __shfl_xor_sync(0xffffffffU, sum[x], step);
    }
  }

  static __device__ __forceinline__ QueryVector weight(const GateParams& p, int head, int gate, int column) {
    QueryVector weight;
    weight.load(p.weight + (head * p.weight_strides[0] + gate * p.weight_strides[1] + column) * bytes_of(C.q));
    return weight;
  }

  /// Adds the products of q's columns from `column` on to the logits.
  static __device__ __forceinline__ void add_logits(float (&logits)[kGates], const GateParams& p, int head, int column,
                                                    const QueryVector& q) {
#pragma unroll
    for (int x = 0; x < kGates; ++x) {
      const QueryVector w = weight(p, head, x, column);
#pragma unroll
      for (int i = 0; i < C.width; ++i) logits[x] += q.at[i] * w.at[i];
    }
  }

  static __device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

  /// The gates that do not depend on q: 1 / kGates, or given gates, which are 0 for a row that does not exist.
  static __device__ __forceinline__ void find_given(float (&gates)[kGates], const GateParams& p, const GateRow& row,
                                                    bool exists) {
#pragma unroll
    for (int x = 0; x < kGates; ++x) {
      gates[x] = 1.0F / kGates;
      if constexpr (C.source == GateSource::given) gates[x] = exists ? p.gates[row.at(p.gate_strides) + x] : 0.0F;
    }
  }
};

}  // namespace tessera::cuda
