// SPDX-License-Identifier: Apache-2.0
// Conversion of e4m3 and e5m2 to fp16 or bf16 in registers. It is exact.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// Returns the highest bit of each of four bytes that is not finite; all other bits are 0.
template <Element from>
__device__ __forceinline__ u32 non_finite_bytes(u32 bytes) {
  if constexpr (from == Element::e4m3) return ((bytes & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U;
  return ((bytes & 0x7C7C7C7CU) + 0x04040404U) & 0x80808080U;
}

/// Converts two bytes, each the upper byte of 16 bits, to two numbers. NaN and infinities may become finite numbers.
template <Element to, Element from>
__device__ __forceinline__ u32 widen_finite(u32 upper) {
  if constexpr (to == Element::fp16 && from == Element::e5m2) return upper;
  constexpr int shift = (to == Element::fp16 ? 5 : 8) - (from == Element::e4m3 ? 4 : 5);
  constexpr u32 magnitude = (0x7F00U >> shift) * 0x10001U;
  // The exponent still has the bias of `from`. Multiplying by a power of two corrects it, for subnormal numbers too.
  constexpr u32 power = (to == Element::fp16 ? 15 : 127) - (from == Element::e4m3 ? 7 : 15);
  constexpr u32 factor = (to == Element::fp16 ? (15U + power) << 10U : (127U + power) << 7U) * 0x10001U;
  return ptx::fma_pair<to>((upper & 0x80008000U) | (upper >> shift & magnitude), factor, 0x80008000U);
}

/// Replaces those numbers of `pair` whose bytes are not finite by NaN or infinity.
template <Element to, Element from>
__device__ __forceinline__ u32 with_non_finite(u32 upper, u32 pair) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 byte = upper >> (16 * half + 8) & 0xFFU;
    if (non_finite_bytes<from>(byte) == 0) continue;
    const bool infinite = from == Element::e5m2 && (byte & 3U) == 0;
    const u32 value = infinite ? (to == Element::fp16 ? 0x7C00U : 0x7F80U) : 0x7FFFU;
    pair = (pair & (0xFFFF0000U >> (16 * half))) | ((byte & 0x80U) << 8U | value) << (16 * half);
  }
  return pair;
}

#if __CUDA_ARCH__ >= 890
/// Converts bytes 0 and 1 to two numbers.
template <Element to, Element from>
__device__ __forceinline__ u32 widen_pair(u32 bytes) {
  const u32 halves = ptx::unpack_bytes<from>(bytes);
  if constexpr (to == Element::fp16) return halves;
  float low;
  float high;
  ptx::unpack<Element::fp16>(halves, low, high);
  return ptx::pack<to>(low, high);
}
#endif

/// Converts bytes 0 and 1 to `low`, 2 and 3 to `high`; with `alternates`, 0 and 2 to `low`, 1 and 3 to `high`.
template <Element to, Element from, bool alternates, int words>
__device__ __forceinline__ void widen(const u32 (&bytes)[words], u32 (&low)[words], u32 (&high)[words]) {
#if __CUDA_ARCH__ >= 890
  if constexpr (to == Element::bf16 || from == Element::e4m3) {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const u32 ordered = alternates ? __byte_perm(bytes[i], 0, 0x3120) : bytes[i];
      low[i] = widen_pair<to, from>(ordered);
      high[i] = widen_pair<to, from>(ordered >> 16U);
    }
    return;
  }
#endif
  constexpr u32 low_bytes = alternates ? 0x2404 : 0x1404;
  constexpr u32 high_bytes = alternates ? 0x3414 : 0x3424;
  u32 flags = 0;
#pragma unroll
  for (int i = 0; i < words; ++i) {
    low[i] = widen_finite<to, from>(__byte_perm(bytes[i], 0, low_bytes));
    high[i] = widen_finite<to, from>(__byte_perm(bytes[i], 0, high_bytes));
    flags |= non_finite_bytes<from>(bytes[i]);
  }
  if (to == Element::fp16 && from == Element::e5m2) return;
  if (flags == 0) return;
#pragma unroll
  for (int i = 0; i < words; ++i) {
    low[i] = with_non_finite<to, from>(__byte_perm(bytes[i], 0, low_bytes), low[i]);
    high[i] = with_non_finite<to, from>(__byte_perm(bytes[i], 0, high_bytes), high[i]);
  }
}

}  // namespace tessera::cuda
