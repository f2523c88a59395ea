// SPDX-License-Identifier: Apache-2.0
// Conversion of fp32 to elements of 8 bits, to nearest, ties to even (docs/quantization.md).
#pragma once

#include "cuda/ptx/convert.cuh"

namespace tessera::cuda {

/// `largest` is the largest finite number of an 8-bit type. Numbers of magnitude `end` and above are out of range.
template <Element type>
struct EightBits {
  static_assert(has_eight_bits(type));
  static constexpr float largest = type == Element::e4m3 ? 448.0F : type == Element::e5m2 ? 57344.0F : 127.0F;
  static constexpr float end = type == Element::e4m3 ? 464.0F : type == Element::e5m2 ? 61440.0F : 127.5F;

  /// Whether x counts as saturated. NaN does if the type has no NaN.
  static __device__ __forceinline__ bool is_out_of_range(float x) {
    return type == Element::int8 ? !(fabsf(x) < end) : fabsf(x) >= end;
  }

  /// `low` goes into the low byte.
  static __device__ __forceinline__ u32 pack(float low, float high) {
#if __CUDA_ARCH__ >= 890
    if constexpr (type != Element::int8) return ptx::pack_bytes<type>(low, high);
#endif
    return byte(low) | byte(high) << 8U;
  }

  static __device__ __forceinline__ u32 byte(float x) {
    if constexpr (type == Element::int8) {
      const float bounded = fminf(fmaxf(x, -largest), largest);
      return x == x ? static_cast<u32>(__float2int_rn(bounded)) & 0xFFU : 0U;
    } else {
      constexpr u32 digits = type == Element::e4m3 ? 3 : 2;
      constexpr u32 bias = type == Element::e4m3 ? 7 : 15;
      // The last mantissa bit of `step` is worth the type's smallest subnormal number. So adding a number to it rounds
      // that number to a multiple of the smallest subnormal.
      constexpr float step = __builtin_bit_cast(float, (127U + 24U - bias - digits) << 23U);
      constexpr float normal = __builtin_bit_cast(float, (127U + 1U - bias) << 23U);
      const u32 sign = __float_as_uint(x) >> 24U & 0x80U;
      if (x != x) return sign | 0x7FU;
      const float magnitude = fminf(fabsf(x), largest);
      const u32 subnormal = __float_as_uint(magnitude + step) - __float_as_uint(step);
      const u32 bits = __float_as_uint(magnitude) - ((127U - bias) << 23U);
      const u32 rounded = (bits + ((1U << (22U - digits)) - 1U) + (bits >> (23U - digits) & 1U)) >> (23U - digits);
      return sign | (magnitude < normal ? subnormal : rounded);
    }
  }
};

}  // namespace tessera::cuda
