// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/dot_keys.h"

#include <cstring>

namespace tessera::cpu {

bool uses_dots(const Problem& problem, const Kernels& kernels) {
  return kernels.dots != nullptr && problem.q_type == DType::bf16 && problem.k_type == DType::bf16 &&
         problem.v_type == DType::bf16 && (problem.pass == Pass::forward || problem.o_type == DType::bf16);
}

void copy_rows(const std::byte* source, std::ptrdiff_t stride, std::int64_t rows, std::int64_t count,
               std::uint16_t* target, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, target += width) {
    std::memcpy(target, source + row * stride, static_cast<std::size_t>(count) * sizeof *target);
    std::fill_n(target + count, width - count, std::uint16_t{0});
  }
}

void copy_keys(const KeyView& view, std::int64_t dim, std::int64_t first, std::int64_t count, std::int64_t head,
               std::uint16_t* target, std::int64_t width) {
  while (count > 0) {
    const std::int64_t rows = view.run(first, count);
    copy_rows(view.at(first, head), view.row, rows, dim, target, width);
    first += rows;
    count -= rows;
    target += rows * width;
  }
}

DotKeys DotKeys::place(Arena& arena, std::int64_t tile_kv, const Problem& problem) {
  DotKeys keys;
  keys.rows = padded_dots(tile_kv);
  keys.d = padded_dots(problem.head_dim_qk);
  keys.dv = padded_tiles(problem.head_dim_v);
  keys.k = arena.take<std::uint16_t>((keys.rows + kDotTile) * keys.d);
  keys.v = arena.take<std::uint16_t>(keys.rows * keys.dv);
  keys.v_t = arena.take<std::uint16_t>(keys.rows * keys.dv);
  keys.pairs = arena.take<std::uint32_t>(kDotStep / 2 * keys.dv);
  keys.begun = arena.take<bool>(keys.rows / kDotStep);
  keys.stale = arena.take<bool>(keys.rows / kDotStep);
  keys.finite = arena.take<bool>(keys.rows / kDotStep);
  return keys;
}

void DotKeys::load(const Segment& source, const Problem& problem, std::int64_t first, std::int64_t count,
                   std::int64_t head, std::int64_t row) const {
  for (std::int64_t chunk = row / kDotStep; chunk * kDotStep < row + count; ++chunk) {
    if (!begun[chunk]) std::fill_n(v + chunk * kDotStep * dv, kDotStep * dv, std::uint16_t{0});
    begun[chunk] = stale[chunk] = true;
  }
  copy_keys(source.k, problem.head_dim_qk, first, count, head, k + row * d, d);
  copy_keys(source.v, problem.head_dim_v, first, count, head, v + row * dv, dv);
}

void DotKeys::transpose_values(const Kernels& kernels) const {
  for (std::int64_t chunk = 0; chunk < rows / kDotStep; ++chunk) {
    if (!begun[chunk] || !stale[chunk]) continue;
    stale[chunk] = false;
    const std::uint16_t* values = v + chunk * kDotStep * dv;
    finite[chunk] = kernels.bf16_finite(kDotStep * dv, values);
    kernels.interleave(kDotStep, dv, values, dv, pairs, dv);
    // A pair moves as one 32-bit number.
    kernels.transpose(kDotStep / 2, dv, reinterpret_cast<const float*>(pairs), dv,
                      reinterpret_cast<float*>(v_t + chunk * kDotStep), rows / 2);
  }
}

}  // namespace tessera::cpu
