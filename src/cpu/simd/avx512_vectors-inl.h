// SPDX-License-Identifier: Apache-2.0
// Operations on AVX-512 vectors, for the loops of the dot-product kernels.
// Included where its instructions are switched on: no include guard by design.
namespace tessera::cpu {
namespace {

struct Avx512Vectors {
  using Vector = __m512;
  using Bits = __m512i;
  static HWY_INLINE Vector zero() { return _mm512_setzero_ps(); }
  static HWY_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static HWY_INLINE Bits load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
  static HWY_INLINE void store(Vector v, float* p) { _mm512_storeu_ps(p, v); }
  static HWY_INLINE void store(Bits v, std::uint32_t* p) { _mm512_storeu_si512(p, v); }
  static HWY_INLINE __m256i load_half(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  // Transposes 16 × 16. The intrinsics have a mask of ones, because g++ 12 warns of the forms without one.
  static HWY_INLINE void transpose(Bits (&rows)[kDotTile]) {
    constexpr __mmask16 kAll = 0xFFFF;
    constexpr __mmask8 kAll64 = 0xFF;
    Bits transposed[kDotTile];
#pragma GCC unroll 4
    for (int i = 0; i < kDotTile; i += 4) {  // 4 × 4 in each 128 bits
      const Bits low01 = _mm512_maskz_unpacklo_epi32(kAll, rows[i], rows[i + 1]);
      const Bits high01 = _mm512_maskz_unpackhi_epi32(kAll, rows[i], rows[i + 1]);
      const Bits low23 = _mm512_maskz_unpacklo_epi32(kAll, rows[i + 2], rows[i + 3]);
      const Bits high23 = _mm512_maskz_unpackhi_epi32(kAll, rows[i + 2], rows[i + 3]);
      transposed[i] = _mm512_maskz_unpacklo_epi64(kAll64, low01, low23);
      transposed[i + 1] = _mm512_maskz_unpackhi_epi64(kAll64, low01, low23);
      transposed[i + 2] = _mm512_maskz_unpacklo_epi64(kAll64, high01, high23);
      transposed[i + 3] = _mm512_maskz_unpackhi_epi64(kAll64, high01, high23);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // 4 × 4 blocks of 128 bits
      const Bits even04 = _mm512_maskz_shuffle_i32x4(kAll, transposed[i], transposed[i + 4], 0x88);
      const Bits odd04 = _mm512_maskz_shuffle_i32x4(kAll, transposed[i], transposed[i + 4], 0xDD);
      const Bits even8 = _mm512_maskz_shuffle_i32x4(kAll, transposed[i + 8], transposed[i + 12], 0x88);
      const Bits odd8 = _mm512_maskz_shuffle_i32x4(kAll, transposed[i + 8], transposed[i + 12], 0xDD);
      rows[i] = _mm512_maskz_shuffle_i32x4(kAll, even04, even8, 0x88);
      rows[i + 4] = _mm512_maskz_shuffle_i32x4(kAll, odd04, odd8, 0x88);
      rows[i + 8] = _mm512_maskz_shuffle_i32x4(kAll, even04, even8, 0xDD);
      rows[i + 12] = _mm512_maskz_shuffle_i32x4(kAll, odd04, odd8, 0xDD);
    }
  }
};

}  // namespace
}  // namespace tessera::cpu
