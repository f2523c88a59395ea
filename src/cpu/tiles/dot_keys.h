// SPDX-License-Identifier: Apache-2.0
// A tile's keys in the layouts of the dot-product kernels: K as rows of bf16, V transposed so that the keys of each dim
// are contiguous.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/sequence.h"

namespace tessera::cpu {

/// Whether a problem is computed by dot products: all operands are bf16 (a backward's dout has the type of o) and the
/// instruction set has them.
bool uses_dots(const Problem& problem, const Kernels& kernels);

/// Copies rows of bf16, padded with zeros to `width`.
void copy_rows(const std::byte* source, std::ptrdiff_t stride, std::int64_t rows, std::int64_t count,
               std::uint16_t* target, std::int64_t width);
/// Copies keys [first, first + count) of a head.
void copy_keys(const KeyView& view, std::int64_t dim, std::int64_t first, std::int64_t count, std::int64_t head,
               std::uint16_t* target, std::int64_t width);

struct DotKeys {
  std::int64_t rows = 0;           // tile_kv padded to whole chunks of kDotStep
  std::int64_t d = 0;              // padded_dots(head_dim_qk)
  std::int64_t dv = 0;             // padded_tiles(head_dim_v)
  std::uint16_t* k = nullptr;      // (rows + kDotTile, d): a product may read up to a whole tile behind the last key
  std::uint16_t* v = nullptr;      // (rows, dv)
  std::uint16_t* v_t = nullptr;    // (dv, rows)
  std::uint32_t* pairs = nullptr;  // (kDotStep / 2, dv): a chunk of V on its way to v_t
  bool* begun = nullptr;           // (chunks): has loaded rows of V; the other rows are 0
  bool* stale = nullptr;           // (chunks): V has rows that v_t lacks
  bool* finite = nullptr;          // (chunks): whether V is finite

  static DotKeys place(Arena& arena, std::int64_t tile_kv, const Problem& problem);
  void begin() const { std::fill_n(begun, rows / kDotStep, false); }
  /// Loads keys [first, first + count) of the segment into rows from `row` on.
  void load(const Segment& source, const Problem& problem, std::int64_t first, std::int64_t count, std::int64_t head,
            std::int64_t row) const;
  /// Updates v_t after the last load().
  void transpose_values(const Kernels& kernels) const;
  /// Whether rows [first, end) of V, which begin and end with a chunk, are finite.
  [[nodiscard]] bool values_finite(std::int64_t first, std::int64_t end) const {
    return std::all_of(finite + first / kDotStep, finite + end / kDotStep, [](bool each) { return each; });
  }
};

}  // namespace tessera::cpu
