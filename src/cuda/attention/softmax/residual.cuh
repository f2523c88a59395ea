// SPDX-License-Identifier: Apache-2.0
// The residual of O: what rounding it to 16 bits loses, as signed bytes, in steps of 1/254 of the spacing of O's type
// at the rounded value (docs/semantics.md, section 6). The byte of a value that is not finite is undefined.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

inline constexpr float kResidualSteps = 254.0F;  // steps in a spacing; the largest residual is half a spacing

/// digits: bits of the type's fraction; least: the biased exponent of fp32 below which the spacing is constant. The
/// spacing of bf16 is at least 2^-126, so that it and its reciprocal are normal numbers.
template <Element type>
struct ResidualFormat {
  static_assert(type == Element::bf16 || type == Element::fp16);
  static constexpr int digits = type == Element::bf16 ? 7 : 10;
  static constexpr int least = type == Element::bf16 ? 8 : 113;

  static __device__ __forceinline__ int exponent(float rounded) {
    return max(__float_as_int(rounded) >> 23 & 0xff, least);
  }
  /// Returns the byte in the lowest byte of the result. A sum with 1.5 · 2^23, whose unit in the last place is 1, is
  /// rounded to an integer; a conversion would take four times as long.
  static __device__ __forceinline__ u32 byte_of(float exact, float rounded) {
    const u32 inverse = ~__float_as_uint(rounded) & 0x7f800000U;  // 255 − the biased exponent, as an exponent
    const u32 reciprocal = __viaddmin_u32(inverse, (digits - 1U) << 23U, (254U + digits - least) << 23U);
    const float spacings = (exact - rounded) * __uint_as_float(reciprocal);
    return __float_as_uint(__fmaf_rn(spacings, kResidualSteps, 12582912.0F));
  }
  static __device__ __forceinline__ float sum(float rounded, int byte) {
    const float spacing = __int_as_float((exponent(rounded) - digits) << 23);
    return __fmaf_rn(static_cast<float>(byte), spacing * (1.0F / kResidualSteps), rounded);
  }
};

/// Returns the bytes of two neighbouring columns of O; the first is the low byte of 16 bits.
template <Element type>
__device__ __forceinline__ u32 residual_pair(float first, float second) {
  float rounded[2];
  ptx::unpack<type>(ptx::pack<type>(first, second), rounded[0], rounded[1]);
  const u32 low = ResidualFormat<type>::byte_of(first, rounded[0]);
  const u32 high = ResidualFormat<type>::byte_of(second, rounded[1]);
  return __byte_perm(low, high, 0x0040);
}

/// Adds the residuals of 8 neighbouring columns; `from`: their bytes, aligned to 8.
template <Element type>
__device__ __forceinline__ void add_residual(float (&rounded)[8], const signed char* from) {
  const uint2 bytes = *reinterpret_cast<const uint2*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 word = i < 4 ? bytes.x : bytes.y;
    rounded[i] = ResidualFormat<type>::sum(rounded[i], static_cast<signed char>(word >> (i % 4 * 8) & 0xffU));
  }
}

}  // namespace tessera::cuda
