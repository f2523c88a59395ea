// SPDX-License-Identifier: Apache-2.0
// Gradients of the gates' weights: adds the partial sums of NsaGateGradient in a fixed order.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/math.cuh"
#include "shared/nsa_gate.h"

namespace tessera::cuda {

struct NsaGateSum {
  static constexpr int kThreads = 256;

  static __device__ __forceinline__ void run(const GateSumParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    const int at = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (at >= p.count) return;
    float sum = 0.0F;
#pragma unroll 8
    for (int part = 0; part < p.part_count; ++part) sum += p.parts[part * static_cast<i64>(p.count) + at];
    const int row = ptx::divide(at, p.d);
    const int column = at - row * static_cast<int>(p.d.value);
    p.sum[row / kGates * p.strides[0] + row % kGates * p.strides[1] + column] = sum;
  }
};

}  // namespace tessera::cuda
