// SPDX-License-Identifier: Apache-2.0
// Products of bf16 operands with fp32 sums, for instruction sets that multiply pairs of bf16 in one step: AVX512-BF16
// and AMX-BF16. Both take one operand as rows, and the other one as pairs of consecutive rows, interleaved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/simd/prefetch.h"

namespace tessera::cpu {

/// Columns of a panel: the fixed row stride of score tiles and packed operands. A multiple of every vector length, and
/// 64 rows of it (16 KiB) stay in L1.
inline constexpr std::int64_t kPanel = 64;
/// Up to this many queries read keys in place, which is faster than a panel that they do not fill.
inline constexpr std::int64_t kDecodeQueries = 8;
/// Keys that they read together.
inline constexpr std::int64_t kDecodeKeys = 32;

/// Rows of A are padded to a multiple of this many elements, one row of an AMX tile.
inline constexpr std::int64_t kDotStep = 32;
/// The numbers of rows and columns of C are multiples of this, the size of an AMX tile.
inline constexpr std::int64_t kDotTile = 16;

inline constexpr std::int64_t padded_dots(std::int64_t n) { return (n + kDotStep - 1) / kDotStep * kDotStep; }
inline constexpr std::int64_t padded_tiles(std::int64_t n) { return (n + kDotTile - 1) / kDotTile * kDotTile; }

/// The type of Kernels::transpose.
using Transpose = void (*)(std::int64_t rows, std::int64_t columns, const float* source, std::ptrdiff_t source_ld,
                           float* target, std::ptrdiff_t ld);

/// Writes the sums (queries, kDecodeKeys) of decode_scores to S (kDecodeKeys, kPanel).
inline void put_decode_scores(std::int64_t queries, const float* sums, float* s, Transpose transpose) {
  if (queries > 1) return transpose(queries, kDecodeKeys, sums, kDecodeKeys, s, kPanel);
  for (std::int64_t i = 0; i < kDecodeKeys; ++i) s[i * kPanel] = sums[i];
}

/// The forward's tiles that were the fastest (docs/experiments/cpu-forward.md). Every tile of keys loads the sums of O
/// from L2 and stores them there, which matters more if products are fast. Every tile of queries loads the keys again.
struct ForwardTiles {
  std::int64_t keys;
  std::int64_t query_bytes;  // of Q and O in fp32
};
inline constexpr ForwardTiles kFloatTiles = {128, std::int64_t{2048} * 1024};
inline constexpr ForwardTiles kVectorTiles = {256, std::int64_t{2048} * 1024};
inline constexpr ForwardTiles kAmxTiles = {512, std::int64_t{512} * 1024};

struct DotKernels {
  /// Called before the first product of a thread and after its last one, because AMX needs its tiles configured.
  void (*begin)();
  void (*end)();

  /// C (m × n) = A (m × k) · B (k × n), or C·column_scale + A·B when accumulate. A is rows of bf16, lda elements apart;
  /// B is pairs of rows: element (t, j) of b holds B(2t, j) in its low half and B(2t + 1, j) in its high half, ldb
  /// elements apart. m and n are multiples of kDotTile, k of kDotStep; column_scale (n) may be nullptr (1).
  void (*matmul)(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a, std::ptrdiff_t lda,
                 const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                 const float* column_scale);

  ForwardTiles forward;

  /// Keys whose values are added together, grouped from the tile's first key on: a pair, or a row of an AMX tile.
  std::int64_t keys_together;
  /// Kernels::decode_scores and decode_values on rows of bf16, bit for bit as matmul. The dim of K is a multiple of
  /// kDotStep, the dim of V of kDotTile. q has rows of bf16 that are not scaled.
  void (*decode_scores)(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint16_t* q, float* s, const RowsAhead& ahead, Transpose transpose);
  /// Row t of p (of kPanel) holds the pairs of weights of rows 2t and 2t + 1. The number of rows is a multiple of
  /// keys_together.
  void (*decode_values)(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint32_t* p, float* o, const RowsAhead& ahead);

  /// For rooflines: does products on registers alone, `rounds` times. Returns the number of operations. Needs begin().
  double (*peak)(std::int64_t rounds);
};

/// Calls begin() and, even if something is thrown, end() for a thread's products. Does nothing for nullptr.
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

// One function for each file: it returns nullptr if the compiler or this machine lacks the instructions.
const DotKernels* amx_bf16_kernels();
const DotKernels* avx512_bf16_kernels();

/// Whether VDPBF16PS is faster than two fp32 multiply-adds. On AMD's cores it is twice as fast. Intel's cores split it:
/// 80 GFLOP/s per core, where fp32 has 160 (Xeon with AMX at 2.2 GHz), so there it is used only on request.
bool avx512_bf16_is_fast();

/// The loops of both with their instructions emulated in C++, so that they are tested on every machine.
std::span<const NamedDotKernels> emulated_dot_kernels();

}  // namespace tessera::cpu
