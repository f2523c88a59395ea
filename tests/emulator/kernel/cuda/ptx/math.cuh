// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/ptx/aligned.cuh"
#include "shared/types.h"

namespace tessera::cuda {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000U);
inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

}  // namespace tessera::cuda

namespace tessera::cuda::ptx {

inline float without_subnormal(float x) { return fabsf(x) < 1.17549435e-38F ? copysignf(0.0F, x) : x; }

inline float exp2(float x) { return without_subnormal(exp2f(without_subnormal(x))); }
inline float log2(float x) { return without_subnormal(log2f(without_subnormal(x))); }
inline float reciprocal(float x) { return without_subnormal(1.0F / without_subnormal(x)); }

template <Element type>
u32 pack(float low, float high) {
  return emulator::from_double(low, type == Element::bf16) | emulator::from_double(high, type == Element::bf16) << 16;
}

template <Element type>
u32 fma_pair(u32 a, u32 b, u32 c) {
  constexpr bool bf16 = type == Element::bf16;
  u32 both = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const double product = static_cast<double>(emulator::to_float(a >> shift & 0xffff, bf16)) *
                           emulator::to_float(b >> shift & 0xffff, bf16);
    both |= emulator::from_double(product + emulator::to_float(c >> shift & 0xffff, bf16), bf16) << shift;
  }
  return both;
}

inline void store_16(void* to, const u32 (&value)[4], Place at = {}) {
  __builtin_memcpy(aligned_16(to, at), value, 16);
}
inline void store_16_if(bool is_wanted, void* to, const u32 (&value)[4], Place at = {}) {
  if (is_wanted) store_16(to, value, at);
}

inline void load_shared_16(u32 (&value)[4], u32 from, Place at = {}) {
  __builtin_memcpy(value, emulator::shared(from, 16, at), 16);
}
inline void load_shared_16(float (&value)[4], u32 from, Place at = {}) {
  __builtin_memcpy(value, emulator::shared(from, 16, at), 16);
}
inline float load_shared_4(u32 from, Place at = {}) {
  float value;
  __builtin_memcpy(&value, emulator::shared(from, 4, at), 4);
  return value;
}
inline void load_shared_8(float& a, float& b, u32 from, Place at = {}) {
  const char* pair = emulator::shared(from, 8, at);
  __builtin_memcpy(&a, pair, 4);
  __builtin_memcpy(&b, pair + 4, 4);
}
inline void store_shared_16(u32 to, const u32 (&value)[4], Place at = {}) {
  __builtin_memcpy(emulator::shared(to, 16, at), value, 16);
}
inline void store_shared_16(u32 to, const float (&value)[4], Place at = {}) {
  __builtin_memcpy(emulator::shared(to, 16, at), value, 16);
}
inline void store_shared_4(u32 to, u32 value, Place at = {}) {
  __builtin_memcpy(emulator::shared(to, 4, at), &value, 4);
}
inline void store_shared_8(u32 to, float a, float b, Place at = {}) {
  char* pair = emulator::shared(to, 8, at);
  __builtin_memcpy(pair, &a, 4);
  __builtin_memcpy(pair + 4, &b, 4);
}

inline const char* advance(const char* base, int count, int stride) { return base + static_cast<i64>(count) * stride; }
inline int divide_by_more_than_one(int x, const Divisor& divisor) {
  return static_cast<int>(__umulhi(static_cast<u32>(x), divisor.multiplier) >> divisor.shift);
}
inline int divide(int x, const Divisor& divisor) {
  return divisor.value == 1 ? x : divide_by_more_than_one(x, divisor);
}
inline u64 remainder(u64 x, const WideDivisor& divisor) {
  const u64 rest = x - __umul64hi(x, divisor.inverse) * divisor.value;
  return rest >= divisor.value ? rest - divisor.value : rest;
}

}  // namespace tessera::cuda::ptx
