// SPDX-License-Identifier: Apache-2.0
// Dot products of bf16 by TDPBF16PS (AMX-BF16: Sapphire Rapids and newer).
#include "cpu/simd/dot_kernels.h"

#if defined(__x86_64__)
#include <hwy/base.h>
#include <immintrin.h>

#include <atomic>

#include "cpu/simd/x86_features.h"

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")
#include "cpu/simd/avx512_vectors-inl.h"
//
#include "cpu/simd/dot_decode_tiles-inl.h"
#include "cpu/simd/dot_tiles-inl.h"

namespace tessera::cpu {
namespace {

// The intrinsics accept only a literal as the register's number.
#define TESSERA_EACH_TILE(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)

struct AmxTiles {
  template <int kTile>
  static HWY_INLINE void zero() {
#define TESSERA_TILE(t) \
  if constexpr (kTile == t) _tile_zero(t);
    TESSERA_EACH_TILE(TESSERA_TILE)
#undef TESSERA_TILE
  }
  template <int kTile>
  static HWY_INLINE void load(const void* from, std::ptrdiff_t stride) {
#define TESSERA_TILE(t) \
  if constexpr (kTile == t) _tile_loadd(t, from, stride);
    TESSERA_EACH_TILE(TESSERA_TILE)
#undef TESSERA_TILE
  }
  template <int kTile>
  static HWY_INLINE void store(float* to, std::ptrdiff_t stride) {
#define TESSERA_TILE(t) \
  if constexpr (kTile == t) _tile_stored(t, to, stride);
    TESSERA_EACH_TILE(TESSERA_TILE)
#undef TESSERA_TILE
  }
  template <int kSum, int kA, int kB>
  static HWY_INLINE void dot() {
    if constexpr (kSum == 0 && kA == 4 && kB == 6) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kSum == 1 && kA == 4 && kB == 7) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kSum == 2 && kA == 5 && kB == 6) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kSum == 3 && kA == 5 && kB == 7) _tile_dpbf16ps(3, 5, 7);
  }
  static HWY_INLINE bool all_ones(std::int64_t n, const float* factor) {
    __mmask16 other = 0;
    for (std::int64_t j = 0; j < n; j += kDotTile) {
      other |= _mm512_cmp_ps_mask(_mm512_loadu_ps(factor + j), _mm512_set1_ps(1.0F), _CMP_NEQ_UQ);
    }
    return other == 0;
  }
  static HWY_INLINE void scale(std::int64_t m, std::int64_t n, float* c, std::ptrdiff_t ldc, const float* factor) {
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; j += kDotTile) {
        float* at = c + i * ldc + j;
        _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(factor + j)));
      }
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);  // g++ does not know that a tile's load reads memory
  }
};

// Does the arithmetic of TDPBF16PS with AVX-512, for few queries.
struct Avx512Chains : Avx512Vectors {
  static constexpr __mmask16 kAll = 0xFFFF;  // g++ 12 warns of the forms without a mask
  static HWY_INLINE Vector low(Bits pairs) { return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, pairs, 16)); }
  static HWY_INLINE Vector high(Bits pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000U))));
  }
  static HWY_INLINE Vector widen(const std::byte* p) { return low(_mm512_maskz_cvtepu16_epi32(kAll, load_half(p))); }
  static HWY_INLINE Vector broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static HWY_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static HWY_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }

  /// Sets the thread's modes to those of TDPBF16PS, which ignores them: round to nearest, subnormals are 0.
  class Flush {
   public:
    Flush() : modes_(_mm_getcsr()) { _mm_setcsr(kMasked | kDenormalsAreZero | kFlushToZero); }
    ~Flush() { _mm_setcsr(modes_); }
    Flush(const Flush&) = delete;
    Flush& operator=(const Flush&) = delete;

   private:
    static constexpr unsigned kMasked = 0x1F80, kDenormalsAreZero = 0x40, kFlushToZero = 0x8000;
    unsigned modes_;
  };
};

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void configure() {
  static constexpr TileConfiguration kConfiguration;
  _tile_loadconfig(&kConfiguration);
}
void release() { _tile_release(); }

constexpr DotKernels kKernels = {configure,
                                 release,
                                 dot_tiles_matmul<AmxTiles>,
                                 kAmxTiles,
                                 kDotStep,
                                 decode_tile_scores<Avx512Chains>,
                                 decode_tile_values<Avx512Chains>,
                                 dot_tiles_peak<AmxTiles>};

}  // namespace
}  // namespace tessera::cpu
HWY_POP_ATTRIBUTES

const tessera::cpu::DotKernels* tessera::cpu::amx_bf16_kernels() {
  static const bool usable = x86_has(X86Feature::amx_bf16);
  return usable ? &kKernels : nullptr;
}
#else
const tessera::cpu::DotKernels* tessera::cpu::amx_bf16_kernels() { return nullptr; }
#endif
