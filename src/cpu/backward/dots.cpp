// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward/dots.h"

#include <algorithm>
#include <limits>

#include "cpu/scores/non_finite.h"

namespace tessera::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Transposes pairs, each as one 32-bit number.
void transpose(const Kernels& kernels, std::int64_t rows, std::int64_t columns, const void* source,
               std::ptrdiff_t source_ld, void* target, std::ptrdiff_t ld) {
  kernels.transpose(rows, columns, static_cast<const float*>(source), source_ld, static_cast<float*>(target), ld);
}

}  // namespace

BackwardDots BackwardDots::place(Arena& arena, const Problem& problem, const BackwardTiling& tiling) {
  BackwardDots dots;
  const std::int64_t rows = dots.rows_ = padded_dots(tiling.rows);
  const std::int64_t stride = dots.stride_ = tiling.stride;
  const std::int64_t d = dots.d_ = padded_dots(problem.head_dim_qk);
  const std::int64_t dv = dots.dv_ = padded_dots(problem.head_dim_v);
  dots.k_ = arena.take<std::uint16_t>(stride * d);
  dots.v_ = arena.take<std::uint16_t>(stride * dv);
  dots.k_t_ = arena.take<std::uint32_t>(stride * d / 2);
  dots.v_t_ = arena.take<std::uint32_t>(stride * dv / 2);
  dots.k_pairs_ = arena.take<std::uint32_t>(stride * d / 2);
  dots.q_ = arena.take<std::uint16_t>(rows * d);
  dots.dout_ = arena.take<std::uint16_t>(rows * dv);
  dots.pairs_ = arena.take<std::uint32_t>(rows / 2 * dots.width());
  dots.q_t_ = arena.take<std::uint16_t>(rows * d);
  dots.dout_t_ = arena.take<std::uint16_t>(rows * dv);
  dots.p_ = arena.take<std::uint32_t>(rows / 2 * stride);
  dots.ds_ = arena.take<std::uint32_t>(rows / 2 * stride);
  dots.ds_rows_ = arena.take<std::uint16_t>(rows * stride);
  dots.shift_ = arena.take<float>(rows);
  dots.delta_ = arena.take<float>(rows);
  dots.dk_t_ = arena.take<float>(stride * d);
  dots.dv_t_ = arena.take<float>(stride * dv);
  dots.gradient_rows = arena.take<float>(2 * kDotTile * dots.width());
  return dots;
}

void BackwardDots::load_keys(const Segment& source, const Problem& problem, std::int64_t first, std::int64_t count,
                             std::int64_t head, std::int64_t row) const {
  copy_keys(source.k, problem.head_dim_qk, first, count, head, k_ + row * d_, d_);
  copy_keys(source.v, problem.head_dim_v, first, count, head, v_ + row * dv_, dv_);
}

void BackwardDots::transpose_keys(const Kernels& kernels, std::int64_t count) {
  const std::int64_t whole = padded_dots(count);
  std::fill_n(k_ + count * d_, (whole - count) * d_, std::uint16_t{0});
  std::fill_n(v_ + count * dv_, (whole - count) * dv_, std::uint16_t{0});
  transpose(kernels, whole, d_ / 2, k_, d_ / 2, k_t_, stride_);
  transpose(kernels, whole, dv_ / 2, v_, dv_ / 2, v_t_, stride_);
  kernels.interleave(whole, d_, k_, d_, k_pairs_, d_);
  keys_finite_ = kernels.bf16_finite(count * d_, k_) && kernels.bf16_finite(count * dv_, v_);
  std::fill_n(dk_t_, d_ * stride_, 0.0F);
  std::fill_n(dv_t_, dv_ * stride_, 0.0F);
}

void BackwardDots::load_queries(const Kernels& kernels, const Problem& problem, const RowView& q, const RowView& dout,
                                std::int64_t first, std::int64_t rows, std::int64_t head, const float* shift,
                                const float* delta) {
  const std::int64_t whole = padded_dots(rows);
  const auto load = [&](const RowView& source, std::int64_t dim, std::int64_t width, std::uint16_t* target,
                        std::uint16_t* transposed) {
    copy_rows(source.at(first, head), source.row, rows, dim, target, width);
    std::fill_n(target + rows * width, (whole - rows) * width, std::uint16_t{0});
    kernels.interleave(whole, width, target, width, pairs_, width);
    transpose(kernels, whole / 2, width, pairs_, width, transposed, rows_ / 2);
  };
  load(q, problem.head_dim_qk, d_, q_, q_t_);
  load(dout, problem.head_dim_v, dv_, dout_, dout_t_);
  queries_finite_ = kernels.bf16_finite(rows * d_, q_) && kernels.bf16_finite(rows * dv_, dout_);
  std::copy_n(shift, rows, shift_);
  std::fill_n(shift_ + rows, whole - rows, kInfinity);
  std::copy_n(delta, rows, delta_);
  std::fill_n(delta_ + rows, whole - rows, 0.0F);
}

void BackwardDots::scores(const Kernels& kernels, std::int64_t rows, std::int64_t keys, float* s, float* dp) const {
  const std::int64_t whole = padded_dots(rows);
  const std::int64_t columns = padded_dots(keys);
  kernels.dots->matmul(whole, columns, d_, q_, d_, k_t_, stride_, s, stride_, false, nullptr);
  kernels.dots->matmul(whole, columns, dv_, dout_, dv_, v_t_, stride_, dp, stride_, false, nullptr);
  for (std::int64_t row = 0; row < whole && keys < columns; ++row) {
    std::fill_n(s + row * stride_ + keys, columns - keys, -kInfinity);
  }
}

void BackwardDots::softmax_gradient(const Kernels& kernels, std::int64_t rows, std::int64_t keys, const float* s,
                                    const float* dp, float scale) const {
  kernels.gradient_pairs(padded_dots(rows), padded_dots(keys), s, dp, stride_, scale, shift_, delta_, p_, ds_,
                         ds_rows_);
}

void BackwardDots::round(const Kernels& kernels, std::int64_t rows, std::int64_t keys, float* p, float* ds) const {
  const std::int64_t whole = padded_dots(rows);
  const std::int64_t columns = padded_dots(keys);
  for (float* each : {p, ds}) {
    for (std::int64_t row = 0; row < whole; ++row) {
      const std::int64_t live = row < rows ? keys : 0;
      std::fill_n(each + row * stride_ + live, columns - live, 0.0F);
    }
  }
  kernels.round_pairs(whole, columns, p, stride_, p_);
  kernels.round_pairs(whole, columns, ds, stride_, ds_);
  for (std::int64_t row = 0; row < whole; ++row) {
    kernels.store_row(DType::bf16, ds + row * stride_, columns, reinterpret_cast<std::byte*>(ds_rows_ + row * stride_));
  }
}

void BackwardDots::products(const Kernels& kernels, std::int64_t rows, std::int64_t keys, bool masked, float* dq,
                            std::int64_t ld) const {
  const std::int64_t whole = padded_dots(rows);
  const std::int64_t columns = padded_dots(keys);
  // Padding adds 0 · K to the rows of dq behind these, which is NaN if K is not finite.
  const bool padded = keys < columns || rows % kDotTile != 0;
  if ((masked || padded) && !(keys_finite_ && queries_finite_)) {
    careful_dots(SkipZerosOf::b, dv_, columns, rows, dout_t_, rows_, p_, stride_, dv_t_, stride_, nullptr);
    careful_dots(SkipZerosOf::b, d_, columns, rows, q_t_, rows_, ds_, stride_, dk_t_, stride_, nullptr);
    careful_dots(SkipZerosOf::a, rows, ld, keys, ds_rows_, stride_, k_pairs_, d_, dq, ld, nullptr);
    return;
  }
  kernels.dots->matmul(dv_, columns, whole, dout_t_, rows_, p_, stride_, dv_t_, stride_, true, nullptr);
  kernels.dots->matmul(d_, columns, whole, q_t_, rows_, ds_, stride_, dk_t_, stride_, true, nullptr);
  kernels.dots->matmul(padded_tiles(rows), ld, columns, ds_rows_, stride_, k_pairs_, d_, dq, ld, true, nullptr);
}

void BackwardDots::transpose_gradients(const Kernels& kernels, std::int64_t row, float* dk, float* dv) const {
  transpose(kernels, d_, kDotTile, dk_t_ + row, stride_, dk, width());
  transpose(kernels, dv_, kDotTile, dv_t_ + row, stride_, dv, width());
}

}  // namespace tessera::cpu
