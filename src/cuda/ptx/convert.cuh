// SPDX-License-Identifier: Apache-2.0
// Conversions (PTX ISA 9.7.9.21, cvt): two 16-bit values of a 32-bit register to fp32, fp32 to 8 bits, and 8 bits to
// fp16. A bf16 is the upper half of an fp32 and needs no cvt.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
  if constexpr (type == Element::bf16) {
    low = __uint_as_float(both << 16U);
    high = __uint_as_float(both & 0xffff0000U);
  } else {
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}\n"
        : "=f"(low), "=f"(high)
        : "r"(both));
  }
}

/// Rounds two numbers to e4m3 or e5m2, to nearest, ties to even; `low` goes into the low byte. Numbers out of range
/// become the largest finite number of their sign. SM89 and newer.
template <Element type>
__device__ __forceinline__ u32 pack_bytes(float low, float high) {
  unsigned short both;
  if constexpr (type == Element::e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(both) : "f"(high), "f"(low));
  }
  return both;
}

/// Rounds four numbers to e4m3 likewise; the first goes into the lowest byte. SM89 and newer.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
  u32 bytes;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}\n"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

/// Converts bytes 0 and 1, of e4m3 or e5m2, to two fp16 numbers; NaN and infinities are kept. SM89 and newer.
template <Element type>
__device__ __forceinline__ u32 unpack_bytes(u32 bytes) {
  u32 both;
  if constexpr (type == Element::e4m3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(both) : "h"(static_cast<unsigned short>(bytes)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;\n" : "=r"(both) : "h"(static_cast<unsigned short>(bytes)));
  }
  return both;
}

}  // namespace tessera::cuda::ptx
