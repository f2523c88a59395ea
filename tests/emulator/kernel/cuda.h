// SPDX-License-Identifier: Apache-2.0
// CUDA C++ as far as kernels use it, for g++: stands in front of every kernel.
#pragma once

#include "calls.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// All threads of a block are one of the process, and blocks come one after another. Of an array in a function this
// makes one that outlives the call, of an extern one no definition.
#define __shared__ thread_local
// What the compiler may take for granted must be so.
#define __builtin_assume(condition) \
  ((condition) ? void() : emulator::fail("what __builtin_assume says does not hold: " #condition))

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern "C" {
float expf(float);
float exp2f(float);
float logf(float);
float log2f(float);
float log1pf(float);
float sqrtf(float);
float powf(float, float);
float sinf(float);
float cosf(float);
float tanhf(float);
float fabsf(float);
float fmaxf(float, float);
float fminf(float, float);
float fmaf(float, float, float);
float copysignf(float, float);
float floorf(float);
float ceilf(float);
float rintf(float);
double nearbyint(double);
float nextafterf(float, float);
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const auto rounded = static_cast<float>(sum);
  return rounded > sum ? nextafterf(rounded, -__builtin_inff()) : rounded;
}
inline float __frcp_rn(float a) { return 1.0F / a; }
/// Saturates; 0 for NaN.
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0F) return 2147483647;
  return x < -2147483648.0F ? -2147483647 - 1 : static_cast<int>(nearbyint(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __viaddmin_u32(unsigned a, unsigned b, unsigned most) { return a + b < most ? a + b : most; }
/// Four bytes of (b, a), each chosen by 4 bits; the fourth of them stands for eight times its sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (which & 7))) & 255;
    if ((which & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Fibres change only where they wait, so that what lies between two waits is atomic.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}
template <class T>
T atomicAnd(T* at, T value) {
  const T before = *at;
  *at = before & value;
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (value > before) *at = value;
  return before;
}
template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
  const T before = *at;
  if (before == expected) *at = value;
  return before;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline void __threadfence() {}

using emulator::Place;

inline unsigned __cvta_generic_to_shared(const void* pointer) { return emulator::shared_address(pointer); }
inline void __syncthreads(Place at = {}) { emulator::block_barrier(false, at); }
inline int __syncthreads_or(int predicate, Place at = {}) {
  return static_cast<int>(emulator::block_barrier(predicate != 0, at));
}
inline void __syncwarp(unsigned mask = 0xffffffffU, Place at = {}) { emulator::warp_barrier(mask, at); }

namespace emulator {
template <class T>
u64 bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  u64 bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T value_of(u64 bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, Place at = {}) {
  return emulator::value_of<T>(emulator::shuffle(mask, emulator::bits_of(value), source & 31, at));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, Place at = {}) {
  return emulator::value_of<T>(emulator::shuffle(mask, emulator::bits_of(value), emulator::lane() ^ other, at));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, Place at = {}) {
  const int own = emulator::lane();
  const int source = own >= distance ? own - distance : own;
  return emulator::value_of<T>(emulator::shuffle(mask, emulator::bits_of(value), source, at));
}
inline unsigned __ballot_sync(unsigned mask, int predicate, Place at = {}) {
  return emulator::ballot(mask, predicate != 0, at);
}
inline int __any_sync(unsigned mask, int predicate, Place at = {}) {
  return static_cast<int>(emulator::ballot(mask, predicate != 0, at) != 0);
}
inline int __all_sync(unsigned mask, int predicate, Place at = {}) {
  return static_cast<int>(emulator::ballot(mask, predicate == 0, at) == 0);
}
inline int __reduce_add_sync(unsigned mask, int value, Place at = {}) { return emulator::reduce_add(mask, value, at); }
inline int __reduce_min_sync(unsigned mask, int value, Place at = {}) { return emulator::reduce_min(mask, value, at); }

namespace emulator {

// A kernel called with parameters as the driver takes them: the address of each.
template <int... numbers>
struct Numbers {};
template <class... Parameters, int... numbers>
void call(void (*kernel)(Parameters...), void** parameters, Numbers<numbers...> /*of them*/) {
  kernel(*static_cast<Parameters*>(parameters[numbers])...);
}
template <class... Parameters>
void call(void (*kernel)(Parameters...), void** parameters) {
  call(kernel, parameters, Numbers<__integer_pack(sizeof...(Parameters))...>());
}

}  // namespace emulator
