// SPDX-License-Identifier: Apache-2.0
// Dot products of bf16 by VDPBF16PS (AVX512-BF16: Cooper Lake, Sapphire Rapids, Zen 4 and newer).
#include "cpu/kernels/dot_kernels.h"

// Clang 16 itself crashes on vectors of bf16 (at -O1 and above).
#if defined(__x86_64__) && !(defined(__clang__) && __clang_major__ < 17)
#include <hwy/base.h>
#include <immintrin.h>

#include "cpu/kernels/x86_features.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "cpu/kernels/dot_vectors-inl.h"

namespace tessera::cpu {
namespace {

struct Avx512Pairs {
  using Vector = __m512;
  using Bits = __m512i;
  static HWY_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static HWY_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static HWY_INLINE Bits load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
  static HWY_INLINE void store(Vector v, float* p) { _mm512_storeu_ps(p, v); }
  static HWY_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static HWY_INLINE Bits broadcast(const std::uint16_t* pair) {
    int bits;
    __builtin_memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  static HWY_INLINE Vector dot(Vector sum, Bits a, Bits b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

void nothing() {}

constexpr DotKernels kKernels = {nothing, nothing, dot_vectors_matmul<Avx512Pairs>, kVectorKeys,
                                 dot_vectors_peak<Avx512Pairs>};

}  // namespace
}  // namespace tessera::cpu
HWY_POP_ATTRIBUTES

const tessera::cpu::DotKernels* tessera::cpu::avx512_bf16_kernels() {
  static const bool usable = x86_has(X86Feature::avx512_bf16);
  return usable ? &kKernels : nullptr;
}
bool tessera::cpu::avx512_bf16_is_fast() { return x86_is_amd(); }
#else
bool tessera::cpu::avx512_bf16_is_fast() { return false; }
const tessera::cpu::DotKernels* tessera::cpu::avx512_bf16_kernels() { return nullptr; }
#endif
