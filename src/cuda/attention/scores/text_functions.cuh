// SPDX-License-Identifier: Apache-2.0
// Functions that the texts of traced Python functions call (python/tessera/expressions/cuda_text.py). Integers are
// `int` if no result exceeds 32 bits, which the writer of the text has made sure of; otherwise `i64`, which wraps.
#pragma once

#include "cuda/attention/scores/score.cuh"

namespace tessera::cuda {

template <class Integer>
__device__ __forceinline__ Integer plus(Integer a, Integer b) {
  if constexpr (sizeof(Integer) == 4) return a + b;
  return static_cast<Integer>(static_cast<u64>(a) + static_cast<u64>(b));
}
template <class Integer>
__device__ __forceinline__ Integer minus(Integer a, Integer b) {
  if constexpr (sizeof(Integer) == 4) return a - b;
  return static_cast<Integer>(static_cast<u64>(a) - static_cast<u64>(b));
}
template <class Integer>
__device__ __forceinline__ Integer times(Integer a, Integer b) {
  if constexpr (sizeof(Integer) == 4) return a * b;
  return static_cast<Integer>(static_cast<u64>(a) * static_cast<u64>(b));
}
template <class Integer>
__device__ __forceinline__ Integer negated(Integer a) {
  return minus(Integer{0}, a);
}
template <class Integer>
__device__ __forceinline__ Integer magnitude(Integer a) {
  return a < 0 ? negated(a) : a;
}
/// `bits`: 0 to 63; for an int, 0 to 31.
template <class Integer>
__device__ __forceinline__ Integer shifted_left(Integer a, Integer bits) {
  if constexpr (sizeof(Integer) == 4) return static_cast<Integer>(static_cast<u32>(a) << bits);
  return static_cast<Integer>(static_cast<u64>(a) << bits);
}

/// a / b rounded towards −∞; 0 for b = 0. The quotient of the smallest integer and −1 wraps.
template <class Integer>
__device__ __forceinline__ Integer quotient_down(Integer a, Integer b) {
  if (b == 0) return 0;
  if (b == -1) return negated(a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
/// The remainder of quotient_down(), a − quotient · b; 0 for b = 0.
template <class Integer>
__device__ __forceinline__ Integer remainder_down(Integer a, Integer b) {
  if (b == 0 || b == -1) return 0;
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}

/// The same for b > 0 and, with ints, a ≥ −multiple · b, so that an unsigned division is enough.
template <int multiple, class Integer>
__device__ __forceinline__ Integer quotient_of_raised(Integer a, Integer b) {
  if constexpr (sizeof(Integer) == 4) {
    return static_cast<int>((static_cast<u32>(a) + static_cast<u32>(multiple) * b) / static_cast<u32>(b)) - multiple;
  }
  return quotient_down(a, b);
}
template <int multiple, class Integer>
__device__ __forceinline__ Integer remainder_of_raised(Integer a, Integer b) {
  if constexpr (sizeof(Integer) == 4) {
    return static_cast<int>((static_cast<u32>(a) + static_cast<u32>(multiple) * b) % static_cast<u32>(b));
  }
  return remainder_down(a, b);
}

/// The nearest float; an int must be within ±2^22. Adding x to the bits of 1.5 · 2^23 gives the float 1.5 · 2^23 + x,
/// and the subtraction is exact. A conversion takes twice as long or more.
template <class Integer>
__device__ __forceinline__ float float_of_small(Integer x) {
  if constexpr (sizeof(Integer) == 4) return __fadd_rn(__int_as_float(x + 0x4B400000), -12582912.0F);
  return static_cast<float>(x);
}

/// A text returns this for score + slope · (key − query), if the slope depends on none of the three. Kernels may then
/// ask for the slope alone, with AskedSlope for the score.
template <class Integer>
__device__ __forceinline__ float linear_score(float score, float slope, Integer key_less_query) {
  return score + slope * float_of_small(key_less_query);
}
struct AskedSlope {};
struct Slope {
  float value;
};
template <class Integer>
__device__ __forceinline__ Slope linear_score(AskedSlope /*score*/, float slope, Integer /*key_less_query*/) {
  return {slope};
}

/// Off by at most 9 ulp, like a softcap.
__device__ __forceinline__ float tanh_of(float x) { return capped<Softcap::rational>(x, SoftcapParams(1.0F)); }

}  // namespace tessera::cuda
