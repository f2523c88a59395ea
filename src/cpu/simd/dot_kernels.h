// SPDX-License-Identifier: Apache-2.0
// Products of bf16 operands with fp32 sums, for instruction sets that multiply pairs of bf16 in one step: AVX512-BF16
// and AMX-BF16. Both want one operand as rows and the other one as pairs of consecutive rows side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/simd/prefetch.h"

namespace tessera::cpu {

/// Columns of a panel: the fixed row stride of score tiles and packed operands. A multiple of every vector length, and
/// 64 rows of it (16 KiB) stay in L1.
inline constexpr std::int64_t kPanel = 64;
/// So few queries are better served where keys lie in memory than by a panel that they do not fill.
inline constexpr std::int64_t kDecodeQueries = 8;
/// Keys that they read in one go.
inline constexpr std::int64_t kDecodeKeys = 32;

/// Rows of A are padded to this many elements, one row of an AMX tile.
inline constexpr std::int64_t kDotStep = 32;
/// Rows and columns of C come in this many, those of an AMX tile.
inline constexpr std::int64_t kDotTile = 16;

inline constexpr std::int64_t padded_dots(std::int64_t n) { return (n + kDotStep - 1) / kDotStep * kDotStep; }
inline constexpr std::int64_t padded_tiles(std::int64_t n) { return (n + kDotTile - 1) / kDotTile * kDotTile; }

/// Kernels::transpose.
using Transpose = void (*)(std::int64_t rows, std::int64_t columns, const float* source, std::ptrdiff_t source_ld,
                           float* target, std::ptrdiff_t ld);

/// Sums (queries, kDecodeKeys) of decode_scores to where they belong in S (kDecodeKeys, kPanel).
inline void put_decode_scores(std::int64_t queries, const float* sums, float* s, Transpose transpose) {
  if (queries > 1) return transpose(queries, kDecodeKeys, sums, kDecodeKeys, s, kPanel);
  for (std::int64_t i = 0; i < kDecodeKeys; ++i) s[i * kPanel] = sums[i];
}

/// A forward's tiles, measured best (docs/experiments/cpu-forward.md). For every tile of keys the sums of the outputs
/// come from L2 and go back, which counts the more the faster the products are; for every tile of queries the keys are
/// brought in anew.
struct ForwardTiles {
  std::int64_t keys;
  std::int64_t query_bytes;  // of Q and O in fp32
};
inline constexpr ForwardTiles kFloatTiles = {128, std::int64_t{2048} * 1024};
inline constexpr ForwardTiles kVectorTiles = {256, std::int64_t{2048} * 1024};
inline constexpr ForwardTiles kAmxTiles = {512, std::int64_t{512} * 1024};

struct DotKernels {
  /// Before the first product of a thread and after its last one: AMX wants its tiles configured.
  void (*begin)();
  void (*end)();

  /// C (m × n) = A (m × k) · B (k × n), or C·column_scale + A·B when accumulate. A is rows of bf16, lda elements apart;
  /// B is pairs of rows: element (t, j) of b holds B(2t, j) in its low half and B(2t + 1, j) in its high half, ldb
  /// elements apart. m and n are multiples of kDotTile, k of kDotStep; column_scale (n) may be nullptr (1).
  void (*matmul)(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a, std::ptrdiff_t lda,
                 const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                 const float* column_scale);

  ForwardTiles forward;

  /// Keys whose values are added in one go, counted from the tile's first: pairs, or a row of an AMX tile.
  std::int64_t keys_together;
  /// Kernels::decode_scores and decode_values on rows of bf16, to the bit as matmul; dims are multiples of kDotStep, of
  /// V of kDotTile. q is rows of bf16 that are not scaled.
  void (*decode_scores)(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint16_t* q, float* s, const RowsAhead& ahead, Transpose transpose);
  /// Rows 2t and 2t + 1 are those of row t of p, which are pairs of keys (of kPanel); a multiple of keys_together.
  void (*decode_values)(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint32_t* p, float* o, const RowsAhead& ahead);

  /// For rooflines: products on registers alone, as many rounds as told; gives the operations done. Needs begin().
  double (*peak)(std::int64_t rounds);
};

/// A thread's products: begun and ended, whatever is thrown between. Of nullptr nothing.
class DotProducts {
 public:
  explicit DotProducts(const DotKernels* kernels) : kernels_(kernels) {
    if (kernels_ != nullptr) kernels_->begin();
  }
  ~DotProducts() {
    if (kernels_ != nullptr) kernels_->end();
  }
  DotProducts(const DotProducts&) = delete;
  DotProducts& operator=(const DotProducts&) = delete;

 private:
  const DotKernels* kernels_;
};

struct NamedDotKernels {
  const char* isa;
  const DotKernels* kernels;
};

// One for each file: nullptr where the compiler or this machine lacks the instructions.
const DotKernels* amx_bf16_kernels();
const DotKernels* avx512_bf16_kernels();

/// Whether VDPBF16PS does more than two fp32 multiply-adds: on AMD's cores twice as much. Intel's take it apart: 80
/// GFLOP/s a core where fp32 has 160 (Xeon with AMX at 2.2 GHz), so there it is only for those who ask for it.
bool avx512_bf16_is_fast();

/// The tile walks of both with their instructions spelled out in C++, so that they are tested on every machine.
std::span<const NamedDotKernels> emulated_dot_kernels();

}  // namespace tessera::cpu
