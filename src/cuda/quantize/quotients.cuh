// SPDX-License-Identifier: Apache-2.0
// Division of many numbers by one divisor, without the branch for rare operands that every `/` has.
#pragma once

#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// of(x) is x / divisor, correctly rounded, if its magnitude is at least 2^-30. Otherwise it is some number below
/// 2^-30, which every 8-bit type rounds to 0. The error of the product with the reciprocal is less than two units in
/// the last place. The remainder is exact, and the correction by it, rounded once, gives the nearest number (P.
/// Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", IBM J. Res. Dev. 34, 1990).
struct Quotients {
  float divisor;
  float reciprocal;
  bool is_ordinary;  // if not, the reciprocal or remainders may not be exact enough

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
