// SPDX-License-Identifier: Apache-2.0
// Dot products of bf16 by VDPBF16PS (AVX512-BF16: Cooper Lake, Sapphire Rapids, Zen 4 and newer).
#include "cpu/simd/dot_kernels.h"

// Clang 16 itself crashes on vectors of bf16 (at -O1 and above).
#if defined(__x86_64__) && !(defined(__clang__) && __clang_major__ < 17)
#include <hwy/base.h>
#include <immintrin.h>

#include "cpu/simd/x86_features.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "cpu/simd/avx512_vectors-inl.h"
//
#include "cpu/simd/dot_decode-inl.h"
#include "cpu/simd/dot_vectors-inl.h"

namespace tessera::cpu {
namespace {

struct Avx512Pairs : Avx512Vectors {
  static HWY_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static HWY_INLINE Bits broadcast(const std::uint16_t* pair) {
    int bits;
    __builtin_memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  // Interleaves 16 elements of two rows.
  static HWY_INLINE Bits interleave(const std::byte* low, const std::byte* high) {
    const Bits half = _mm512_maskz_broadcast_i64x4(0x0F, load_half(low));
    const Bits both = _mm512_mask_broadcast_i64x4(half, 0xF0, load_half(high));
    const Bits order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                        5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, both);
  }
  static HWY_INLINE Vector dot(Vector sum, Bits a, Bits b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

void nothing() {}

constexpr DotKernels kKernels = {nothing,
                                 nothing,
                                 dot_vectors_matmul<Avx512Pairs>,
                                 kVectorTiles,
                                 2,
                                 dot_decode_scores<Avx512Pairs>,
                                 dot_decode_values<Avx512Pairs>,
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
