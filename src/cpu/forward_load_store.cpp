// SPDX-License-Identifier: Apache-2.0
// What a strip of the forward begins and ends with: Q into panels; O, LSE and mass out.

#include <algorithm>
#include <cmath>

#include "cpu/forward_unit.h"

namespace tessera::cpu {

void ForwardUnit::load_queries(const Strip& strip) {
  for (std::int64_t i = 0; i < run_.tiling.strip_columns; ++i) {
    const std::int64_t c = strip.first_column + i;
    const std::int64_t live = std::min(i, strip.columns - 1);  // columns past the end repeat the last one's limits
    b_.head[c] = static_cast<std::int32_t>(head_ + live / strip.rows);
    b_.position[c] = sequence_.q_position + strip.first_row + live % strip.rows;
    b_.visible[c] = visible_keys(problem_, b_.position[c]);
    b_.maximum[c] = kNothing;
    b_.sum[c] = 0.0F;
  }
  for (std::int64_t first = 0; first < strip.columns; first += kPanel) load_panel(strip, first);
  if (is_few(strip)) load_rows(strip);
  std::fill_n(b_.o + strip.first_column * dv_, run_.tiling.strip_columns * dv_, 0.0F);
}

void ForwardUnit::load_panel(const Strip& strip, std::int64_t first) {
  const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
  const std::int64_t d = problem_.head_dim_qk;
  const std::int64_t width = run_.dots ? padded_dots(d) / 2 : padded(d);  // in pairs of bf16, or fp32
  const std::int64_t live = std::min(kPanel, strip.columns - first);
  for (std::int64_t c = 0; c < live; ++c) {
    const std::int64_t row = strip.first_row + (first + c) % strip.rows;
    const std::byte* source = q.at(row, b_.head[strip.first_column + first + c]);
    float* target = b_.staging + c * width;
    if (run_.dots) {
      copy_rows(source, 0, 1, d, reinterpret_cast<std::uint16_t*>(target), 2 * width);
    } else {
      run_.kernels.load_row(problem_.q_type, source, d, problem_.softmax_scale(), target, width);
    }
  }
  std::fill_n(b_.staging + live * width, (kPanel - live) * width, 0.0F);
  const std::int64_t column = strip.first_column + first;
  if (run_.dots) {
    run_.kernels.transpose(kPanel, width, b_.staging, width, reinterpret_cast<float*>(b_.q_pairs + column * width),
                           kPanel);
  } else {
    run_.kernels.transpose(kPanel, d, b_.staging, width, b_.q + column * d, kPanel);
  }
}

void ForwardUnit::load_rows(const Strip& strip) {
  const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
  const std::int64_t d = problem_.head_dim_qk;
  float* target = q_rows(strip.first_column);
  std::fill_n(target, kFewQueries * d, 0.0F);
  for (std::int64_t c = 0; c < strip.columns; ++c) {
    const std::byte* source = q.at(strip.first_row + c % strip.rows, b_.head[strip.first_column + c]);
    run_.kernels.load_row(problem_.q_type, source, d, problem_.softmax_scale(), target + c * d, d);
  }
}

void ForwardUnit::finish(const Strip& strip) {
  const std::int64_t dv = problem_.head_dim_v;
  const RowView o = rows_of(problem_, run_.bindings[Slot::o], sequence_);
  const ScalarView lse = scalars_of(problem_, run_.bindings[Slot::lse], sequence_);
  const bool split = run_.tiling.splits > 1;
  const std::int64_t last = strip.first_column + strip.columns;
  for (std::int64_t first = strip.first_column; first < last; first += kPanel) {
    const std::int64_t live = std::min(kPanel, last - first);
    run_.kernels.transpose(dv, kPanel, b_.o + first * dv_, kPanel, b_.staging, dv_);
    for (std::int64_t c = 0; c < live; ++c) {
      const std::int64_t row = strip.first_row + (first + c - strip.first_column) % strip.rows;
      const std::int64_t head = b_.head[first + c];
      const float maximum = b_.maximum[first + c];
      const float sum = b_.sum[first + c];
      const float value = sum == 0.0F ? kNothing : maximum + std::log(sum);
      b_.lse[first + c] = value;
      float* result = b_.staging + c * dv_;
      const float inverse = softmax_inverse(maximum, sum, split ? kNothing : sink(head));
      run_.kernels.scale_rows(1, dv_, result, dv_, inverse);
      if (split) {
        run_.partials.write(split_, head, sequence_.q_first + row, result, value);
        continue;
      }
      run_.kernels.store_row(problem_.o_type, result, dv, o.at(row, head));
      if (lse.base) lse.at(row, head) = value;
    }
  }
  if (gathers_mass(problem_)) finish_mass(strip);
}

float ForwardUnit::sink(std::int64_t head) const {
  const Tensor& sinks = run_.bindings[Slot::sink];
  return problem_.sink ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
}

void ForwardUnit::finish_mass(const Strip& strip) {
  if (problem_.mass_prior_lse) {
    const ScalarView prior = scalars_of(problem_, run_.bindings[Slot::prior_lse], sequence_);
    for (std::int64_t c = 0; c < strip.columns; ++c) b_.lse[c] = prior.at(strip.first_row + c, head_);
  }
  b_.mass.end_tile(strip.columns, b_.lse);
}

void ForwardUnit::write_padding(std::int64_t begin, std::int64_t end) const {
  for (std::int64_t h = head_; h < head_ + run_.tiling.heads_a_tile; ++h) {
    write_empty_rows(problem_, run_.bindings, run_.kernels, sequence_, h, begin, end, b_.staging);
  }
}

}  // namespace tessera::cpu
