// SPDX-License-Identifier: Apache-2.0
// Dot products of bf16 by VDPBF16PS (AVX512-BF16: Cooper Lake, Sapphire Rapids, Zen 4 and newer).
#include "cpu/kernels/dot_kernels.h"

// Clang 16 itself crashes on vectors of bf16 (at -O1 and above).
#if defined(__x86_64__) && !(defined(__clang__) && __clang_major__ < 17)
#include <hwy/base.h>
#include <immintrin.h>

#include "cpu/kernels/x86_features.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "cpu/kernels/dot_few-inl.h"
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
  // 16 × 16. Intrinsics have a mask of ones: g++ 12 warns of the forms without.
  static HWY_INLINE void transpose(Bits (&rows)[kDotTile]) {
    constexpr __mmask16 kAll = 0xFFFF;
    constexpr __mmask8 kAll64 = 0xFF;
    Bits turned[kDotTile];
#pragma GCC unroll 4
    for (int i = 0; i < kDotTile; i += 4) {  // 4 × 4 in each 128 bits
      const Bits low01 = _mm512_maskz_unpacklo_epi32(kAll, rows[i], rows[i + 1]);
      const Bits high01 = _mm512_maskz_unpackhi_epi32(kAll, rows[i], rows[i + 1]);
      const Bits low23 = _mm512_maskz_unpacklo_epi32(kAll, rows[i + 2], rows[i + 3]);
      const Bits high23 = _mm512_maskz_unpackhi_epi32(kAll, rows[i + 2], rows[i + 3]);
      turned[i] = _mm512_maskz_unpacklo_epi64(kAll64, low01, low23);
      turned[i + 1] = _mm512_maskz_unpackhi_epi64(kAll64, low01, low23);
      turned[i + 2] = _mm512_maskz_unpacklo_epi64(kAll64, high01, high23);
      turned[i + 3] = _mm512_maskz_unpackhi_epi64(kAll64, high01, high23);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // 4 × 4 of those
      const Bits even04 = _mm512_maskz_shuffle_i32x4(kAll, turned[i], turned[i + 4], 0x88);
      const Bits odd04 = _mm512_maskz_shuffle_i32x4(kAll, turned[i], turned[i + 4], 0xDD);
      const Bits even8 = _mm512_maskz_shuffle_i32x4(kAll, turned[i + 8], turned[i + 12], 0x88);
      const Bits odd8 = _mm512_maskz_shuffle_i32x4(kAll, turned[i + 8], turned[i + 12], 0xDD);
      rows[i] = _mm512_maskz_shuffle_i32x4(kAll, even04, even8, 0x88);
      rows[i + 4] = _mm512_maskz_shuffle_i32x4(kAll, odd04, odd8, 0x88);
      rows[i + 8] = _mm512_maskz_shuffle_i32x4(kAll, even04, even8, 0xDD);
      rows[i + 12] = _mm512_maskz_shuffle_i32x4(kAll, odd04, odd8, 0xDD);
    }
  }
  // 16 elements of two rows side by side.
  static HWY_INLINE Bits interleave(const std::byte* low, const std::byte* high) {
    const Bits half = _mm512_maskz_broadcast_i64x4(0x0F, load_half(low));
    const Bits both = _mm512_mask_broadcast_i64x4(half, 0xF0, load_half(high));
    const Bits order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                        5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, both);
  }
  static HWY_INLINE __m256i load_half(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static HWY_INLINE Vector dot(Vector sum, Bits a, Bits b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

void nothing() {}

constexpr DotKernels kKernels = {nothing,
                                 nothing,
                                 dot_vectors_matmul<Avx512Pairs>,
                                 kVectorKeys,
                                 dot_few_scores<Avx512Pairs>,
                                 dot_few_values<Avx512Pairs>,
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
