// SPDX-License-Identifier: Apache-2.0
// The inner loops of the CPU backend, compiled once per instruction set and reached through one table of pointers.
// Everything is fp32 here; types are converted when rows are loaded and stored. bf16 operands are not converted if the
// instruction set multiplies them (dot_kernels.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/simd/dot_kernels.h"
#include "cpu/simd/expression.h"
#include "tessera/error.h"
#include "tessera/tensor.h"

namespace tessera::cpu {

/// Internal rows are padded to this many floats, the longest vector, so that no loop has a ragged end.
inline constexpr std::int64_t kPad = 16;

inline constexpr std::int64_t padded(std::int64_t n) { return (n + kPad - 1) / kPad * kPad; }

/// A matrix operand whose elements are broadcast one by one: element (i, k) is at data[i·row + k·column].
struct Broadcast {
  const float* data;
  std::ptrdiff_t row;
  std::ptrdiff_t column;  // 1, or row is 1
};

struct Kernels {
  const char* isa;
  bool fused;  // multiply-adds round once

  /// C (m × n) = A (m × k) · B (k × n), or C·column_scale + A·B when accumulate. A·B is summed separately, in the order
  /// of k, so that small products are not added to a large C one by one. n is padded to kPad by the caller's buffers;
  /// rows of B and C have strides ldb and ldc. column_scale (n) may be nullptr (1).
  void (*matmul)(std::int64_t m, std::int64_t n, std::int64_t k, Broadcast a, const float* b, std::ptrdiff_t ldb,
                 float* c, std::ptrdiff_t ldc, bool accumulate, const float* column_scale);

  /// One step of the online softmax (Milakov and Gimelshein 2018) on a panel whose rows are keys and whose columns are
  /// queries: s (rows × kPanel) becomes exp(s − new maximum); maximum, sum (columns) are updated and correction
  /// (columns) gets exp(old maximum − new maximum). `first` is the index of the first row in its tile; the order of
  /// summation depends on it.
  void (*softmax_step)(std::int64_t first, std::int64_t rows, std::int64_t columns, float* s, float* maximum,
                       float* sum, float* correction);

  /// s[i·ld + j] = exp(s[i·ld + j] − shift[i]) for i < rows, j < columns (padded); shift +inf gives 0.
  void (*exp_rows)(std::int64_t rows, std::int64_t columns, float* s, std::ptrdiff_t ld, const float* shift);

  /// ds = p · (dp − delta[row]) · factor; ds may be dp.
  void (*score_gradient)(std::int64_t rows, std::int64_t columns, const float* p, const float* dp, std::ptrdiff_t ld,
                         const float* delta, float factor, float* ds);

  /// Rows are keys: s[row][column] = −inf where row < low[column] or row > high[column].
  void (*mask_window)(std::int64_t rows, std::int64_t columns, float* s, const std::int32_t* low,
                      const std::int32_t* high);

  /// s = c·tanh(s / c) over n floats; derivative (n), if not nullptr, gets 1 − tanh².
  void (*softcap)(std::int64_t n, float cap, float* s, float* derivative);

  /// load_rows() converts rows of `count` elements, `stride` bytes apart, to fp32 times scale, each padded with zeros
  /// to `width`. store_row() converts one row back.
  void (*load_rows)(DType dtype, const std::byte* source, std::ptrdiff_t stride, std::int64_t rows, std::int64_t count,
                    float scale, float* target, std::int64_t width);
  void load_row(DType dtype, const std::byte* source, std::int64_t count, float scale, float* target,
                std::int64_t width) const {
    load_rows(dtype, source, 0, 1, count, scale, target, width);
  }
  void (*store_row)(DType dtype, const float* source, std::int64_t count, std::byte* target);
  /// store_residual() stores what rounding a row of O from `exact` to `rounded`, a half type, lost: one byte per
  /// element (docs/semantics.md, 6). add_residual() adds it to the rounded row in fp32.
  void (*store_residual)(DType dtype, const float* exact, const std::byte* rounded, std::int64_t count,
                         std::int8_t* target);
  void (*add_residual)(DType dtype, const std::int8_t* residual, std::int64_t count, float* row);

  /// target[c·ld + r] = source[r·source_ld + c] for r < rows, c < columns; both multiples of 4.
  void (*transpose)(std::int64_t rows, std::int64_t columns, const float* source, std::ptrdiff_t source_ld,
                    float* target, std::ptrdiff_t ld);

  /// out[i] = Σ a[i·ld + k]·b[i·ld + k] over k < n, in matmul's order of summation.
  void (*dot_rows)(std::int64_t rows, std::int64_t n, const float* a, const float* b, std::ptrdiff_t ld, float* out);
  /// Both update a row of a linear-attention state: s = decay·s + factor·x over n floats (padded). state_row_dot() then
  /// returns Σ s·y; state_row_add() adds weight·s to sum.
  float (*state_row_dot)(std::int64_t n, float decay, float factor, const float* x, const float* y, float* s);
  void (*state_row_add)(std::int64_t n, float decay, float factor, const float* x, float weight, float* s, float* sum);
  /// Whether all of n floats (padded) are finite.
  bool (*all_finite)(std::int64_t n, const float* a);

  /// softmax_step on scores that are not scaled yet (scale > 0), with the probabilities rounded to bf16. Rows 2t and 2t
  /// + 1 of s become row t of pairs, which also has kPanel columns. `rows` is even; s may be overwritten.
  void (*softmax_pairs)(std::int64_t rows, std::int64_t columns, float* s, float scale, float* maximum, float* sum,
                        float* correction, std::uint32_t* pairs);
  /// Rounds s (rows × columns, ld; rows even) to bf16 as pairs of rows, with the same ld.
  void (*round_pairs)(std::int64_t rows, std::int64_t columns, const float* s, std::ptrdiff_t ld, std::uint32_t* pairs);
  /// Computes the backward's P = exp(scale·s − shift[row]) and dS = P∘(dp − delta[row]), rounded to bf16: both as pairs
  /// of rows, dS also as rows. All have ld. rows is even; shift +inf gives 0.
  void (*gradient_pairs)(std::int64_t rows, std::int64_t columns, const float* s, const float* dp, std::ptrdiff_t ld,
                         float scale, const float* shift, const float* delta, std::uint32_t* p, std::uint32_t* ds,
                         std::uint16_t* ds_rows);
  /// Interleaves rows of bf16 (rows even, columns a multiple of kPad) to pairs of rows.
  void (*interleave)(std::int64_t rows, std::int64_t columns, const std::uint16_t* source, std::ptrdiff_t source_ld,
                     std::uint32_t* pairs, std::ptrdiff_t ld);

  /// Whether all of n bf16 (a multiple of kPad) are finite.
  bool (*bf16_finite)(std::int64_t n, const std::uint16_t* values);

  /// s *= factor, rows × columns (padded).
  void (*scale_rows)(std::int64_t rows, std::int64_t columns, float* s, std::ptrdiff_t ld, float factor);
  /// s = factor·s + x over n floats (padded), rounded as in a matmul that accumulates.
  void (*add_row)(std::int64_t n, float factor, const float* x, float* s);

  /// The two products for `queries` (1, or a multiple of 4 up to kDecodeQueries) and dims that are multiples of kPad,
  /// on up to kDecodeKeys rows of K and V in place. They equal matmul's bit for bit. Scores: s (kDecodeKeys × queries,
  /// of kPanel) = rows · q (queries × dim); those past `keys` are undefined.
  void (*decode_scores)(DType dtype, std::int64_t keys, const std::byte* const* rows, std::int64_t dim,
                        std::int64_t queries, const float* q, float* s, const RowsAhead& ahead);
  /// o (queries × dim) += Σ rows[i]·s[i].
  void (*decode_values)(DType dtype, std::int64_t keys, const std::byte* const* rows, std::int64_t dim,
                        std::int64_t queries, const float* s, float* o, const RowsAhead& ahead);

  /// Applies a score callable to a tile. `derivative`, if not nullptr, has the layout of the scores and is multiplied
  /// by d score' / d score.
  void (*run_score)(const LaneProgram& program, const LaneTile& tile, float* derivative);
  /// Writes −inf where a mask callable hides an element.
  void (*run_mask)(const LaneProgram& program, const LaneTile& tile);
  /// s -= slope · |query - key| (ALiBi). `slopes`: one per query head of the batch, `slope_stride` apart.
  void (*subtract_distances)(const LaneTile& tile, const float* slopes, std::ptrdiff_t slope_stride);
  /// Fills a tile with factors: 65536 / threshold for kept elements, 0 for dropped ones.
  void (*dropout_factors)(const LaneTile& tile, const DropoutLanes& dropout);

  const DotKernels* dots = nullptr;  // for bf16 operands, where the instruction set has them
};

/// The table for an instruction set of usable_isas() or emulated_isas(). Throws Error{unsupported} for another name.
const Kernels& kernels_for(std::string_view isa);
/// Whether kernels load and store rows of all these types.
Support has_kernels_of(std::initializer_list<DType> types);

/// Instruction sets that this build has and this machine can run, best first.
std::vector<std::string> usable_isas();
/// For tests: the best instruction set with the dot products of another one, emulated in C++.
std::vector<std::string> emulated_isas();

}  // namespace tessera::cpu
