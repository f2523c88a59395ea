// SPDX-License-Identifier: Apache-2.0
// The second kernel of a decode step of linear attention with splits, whose blocks took parts of the dims of q and k.
// It adds the outputs of the parts in fp32 and rounds the sums once.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/linear.h"

namespace tessera::cuda {

template <LinearSumConfig C>
struct LinearSum {
  static __device__ __forceinline__ void run(const LinearSumParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    const int at = static_cast<int>(blockIdx.x * C.threads() + threadIdx.x);
    if (at >= p.count) return;
    RowVector<C.output, 1> sum;
    sum.at[0] = 0.0F;
#pragma unroll
    for (int part = 0; part < C.parts; ++part) sum.at[0] += p.parts[part * static_cast<i64>(p.count) + at];
    const int row = ptx::divide(at, p.columns);  // of (sequence, token, head)
    const auto column = static_cast<int>(at - row * p.columns.value);
    const int token = ptx::divide(row, p.heads);  // of (sequence, token)
    const auto head = static_cast<int>(row - token * p.heads.value);
    const int batch = ptx::divide(token, p.tokens);
    const auto t = static_cast<int>(token - batch * p.tokens.value);
    const i64 to = batch * p.o_strides.batch + t * p.o_strides.row + head * p.o_strides.head + column;
    sum.store(static_cast<char*>(p.o) + to * bytes_of(C.output));
  }
};

}  // namespace tessera::cuda
