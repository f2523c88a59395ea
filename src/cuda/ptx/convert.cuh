// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.21, cvt: two 16-bit values of a 32-bit register to fp32, where a bf16 is the upper half; fp32 to 8
// bits, and 8 bits to fp16.
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

/// Two numbers rounded to e4m3 or e5m2, to nearest, ties to even; `low` goes into the low byte. What is out of range
/// becomes the largest number of its sign. SM89 and newer.
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

/// Four numbers rounded to e4m3 likewise, the first into the lowest byte. SM89 and newer.
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

/// Bytes 0 and 1 of e4m3 or e5m2 to two numbers of fp16, NaN and infinities too. SM89 and newer.
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
