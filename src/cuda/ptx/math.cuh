// SPDX-License-Identifier: Apache-2.0
// Single-instruction arithmetic.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000U);
inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

}  // namespace tessera::cuda

namespace tessera::cuda::ptx {

/// 2^x, at most 2 ulp off; 0 for −∞. Subnormal results are flushed.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x), −∞ for 0.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x, at most 1 ulp off.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// Rounds two numbers to 16 bits, to nearest, ties to even; `low` goes into the low half.
template <Element type>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if constexpr (type == Element::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

/// Computes a · b + c of both halves.
template <Element type>
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
  u32 both;
  if constexpr (type == Element::bf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  }
  return both;
}

__device__ __forceinline__ void store_16(void* to, const u32 (&value)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

/// store_16 of lanes with `is_wanted`, by a predicate: after a branch the compiler would compute the address again.
__device__ __forceinline__ void store_16_if(bool is_wanted, void* to, const u32 (&value)[4]) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %0, 0;\n"
      "@wanted st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(static_cast<int>(is_wanted)),
      "l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
      : "memory");
}

__device__ __forceinline__ void load_shared_16(u32 (&value)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_shared_16(float (&value)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ float load_shared_4(u32 from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ void load_shared_8(float& a, float& b, u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 to, const u32 (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 to, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(value[0]), "f"(value[1]), "f"(value[2]),
               "f"(value[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(u32 to, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_8(u32 to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(a), "f"(b) : "memory");
}

/// Returns base + count · stride, by one instruction. The compiler would use four if it has widened the stride
/// elsewhere.
__device__ __forceinline__ const char* advance(const char* base, int count, int stride) {
  i64 address;
  asm("mad.wide.s32 %0, %1, %2, %3;\n" : "=l"(address) : "r"(count), "r"(stride), "l"(base));
  return reinterpret_cast<const char*>(address);
}

/// Floor of x / divisor for 0 <= x < 2^31 and a divisor of 2 or more.
__device__ __forceinline__ int divide_by_more_than_one(int x, const Divisor& divisor) {
  return static_cast<int>(__umulhi(static_cast<u32>(x), divisor.multiplier) >> divisor.shift);
}
/// Floor of x / divisor for 0 <= x < 2^31.
__device__ __forceinline__ int divide(int x, const Divisor& divisor) {
  const u32 quotient = __umulhi(static_cast<u32>(x), divisor.multiplier) >> divisor.shift;
  return divisor.value == 1 ? x : static_cast<int>(quotient);  // a selection: a branch would cost registers elsewhere
}

/// x mod divisor for any x: the quotient from the rounded inverse is exact or one too small.
__device__ __forceinline__ u64 remainder(u64 x, const WideDivisor& divisor) {
  const u64 rest = x - __umul64hi(x, divisor.inverse) * divisor.value;
  return rest >= divisor.value ? rest - divisor.value : rest;
}

}  // namespace tessera::cuda::ptx
