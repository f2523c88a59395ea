// SPDX-License-Identifier: Apache-2.0
// Numbers divided by one divisor, without the branch for rare operands that a division has for each.
#pragma once

#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// A quotient is what `/` gives, or, where that is below 2^-30, some number below 2^-30, which every type of 8 bits
/// rounds to 0. The product with the reciprocal is less than two units in the last place off; its remainder is exact,
/// and what it adds, rounded once, makes the nearest number of it (P. Markstein, "Computation of elementary functions
/// on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34, 1990).
struct Quotients {
  float divisor;
  float reciprocal;
  bool is_ordinary;  // else neither the reciprocal nor remainders need be exact enough

  __device__ __forceinline__ explicit Quotients(float divisor) : divisor(divisor), reciprocal(1.0F / divisor) {
    const u32 bits = __float_as_uint(divisor);
    constexpr u32 least = (127U - 60U) << 23U;
    constexpr u32 end = (127U + 60U) << 23U;
    is_ordinary = bits >= least && bits < end && (bits & 0x7FFFFFU) != 0x7FFFFFU;
  }

  __device__ __forceinline__ float of(float x) const {
    const float near = x * reciprocal;
    const float quotient = fmaf(fmaf(-near, divisor, x), reciprocal, near);
    return fabsf(near) < kInfinity ? quotient : near;
  }
};

}  // namespace tessera::cuda
