// SPDX-License-Identifier: Apache-2.0
// The start and the end of a strip of the forward: loads Q into panels; stores O, LSE and mass.

#include <algorithm>
#include <cmath>

#include "cpu/forward/unit.h"

namespace tessera::cpu {
namespace {

// How many rows ahead O is prefetched: writing a row takes about 12 ns in cache, but 100 ns or more in memory.
constexpr std::int64_t kRowsAhead = 16;

}  // namespace

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
      const float descale = sequence_.query_descale(row, b_.head[strip.first_column + first + c]);
      run_.kernels.load_row(problem_.q_type, source, d, problem_.softmax_scale() * descale, target, width);
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

void ForwardUnit::finish(const Strip& strip) {
  const std::int64_t dv = problem_.head_dim_v;
  const ResultRows results(run_, sequence_);
  const std::int64_t last = strip.first_column + strip.columns;
  const auto row_of = [&](std::int64_t column) { return strip.first_row + (column - strip.first_column) % strip.rows; };
  for (std::int64_t first = strip.first_column; first < last; first += kPanel) {
    const std::int64_t live = std::min(kPanel, last - first);
    run_.kernels.transpose(dv, kPanel, b_.o + first * dv_, kPanel, b_.staging, dv_);
    for (std::int64_t c = 0; c < live; ++c) {
      if (const std::int64_t later = first + c + kRowsAhead; later < last) results.ask(b_.head[later], row_of(later));
      b_.lse[first + c] = results.write(split_, b_.head[first + c], row_of(first + c), b_.maximum[first + c],
                                        b_.sum[first + c], b_.staging + c * dv_);
    }
  }
  if (problem_.skip) {
    finish_skip(strip);
  } else if (gathers_mass(problem_)) {
    finish_mass(strip);
  }
}

ResultRows::ResultRows(const ForwardRun& run, const Sequence& sequence)
    : run_(run),
      first_(sequence.q_first),
      o_(run.problem, run.bindings, sequence),
      lse_(scalars_of(run.problem, run.bindings[Slot::lse], sequence)) {}

void ResultRows::ask(std::int64_t head, std::int64_t row) const {
  if (run_.tiling.splits > 1) return;
  const std::byte* target = o_.at(row, head);
  const std::int64_t bytes = run_.problem.head_dim_v * static_cast<std::int64_t>(size_of(run_.problem.o_type));
  for (std::int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(target + byte, 1);
}

float ResultRows::write(std::int64_t split, std::int64_t head, std::int64_t row, float maximum, float sum,
                        float* result) const {
  const Problem& problem = run_.problem;
  const bool splits = run_.tiling.splits > 1;
  const Tensor& sinks = run_.bindings[Slot::sink];
  const float sink = problem.sink && !splits ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
  const float lse = sum == 0.0F ? kNothing : maximum + std::log(sum);
  run_.kernels.scale_rows(1, padded(problem.head_dim_v), result, 0, softmax_inverse(maximum, sum, sink));
  if (splits) {
    run_.partials.write(split, head, first_ + row, result, lse);
  } else {
    o_.store(run_.kernels, result, row, head);
    if (lse_.base) lse_.at(row, head) = lse;
  }
  return lse;
}

void ForwardUnit::finish_mass(const Strip& strip) {
  float* lse = b_.lse + strip.first_column;
  if (problem_.mass_prior_lse) {
    const ScalarView prior = scalars_of(problem_, run_.bindings[Slot::prior_lse], sequence_);
    for (std::int64_t c = 0; c < strip.columns; ++c) lse[c] = prior.at(strip.first_row + c, head_);
  }
  strip.mass->end_tile(strip.columns, lse);
}

void ForwardUnit::write_padding(std::int64_t begin, std::int64_t end) const {
  for (std::int64_t h = head_; h < head_ + run_.tiling.heads_a_tile; ++h) {
    write_empty_rows(problem_, run_.bindings, run_.kernels, sequence_, h, begin, end, b_.staging);
  }
}

}  // namespace tessera::cpu
