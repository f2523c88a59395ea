// SPDX-License-Identifier: Apache-2.0
// A tile of queries against a tile of keys in the backward: scores, masks, probabilities, their gradient, products.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/backward/unit.h"
#include "cpu/scores/non_finite.h"
#include "cpu/tiles/visible_keys.h"

namespace tessera::cpu {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

}  // namespace

bool BackwardUnit::scores_are_plain() const {
  return b_.slope == nullptr && !run_.scores.per_element() && !run_.scores.has_dropout() && !problem_.sink &&
         problem_.softmax_scale() > 0.0F;
}

void BackwardUnit::scores(std::int64_t rows, std::int64_t keys) {
  const Kernels& kernels = run_.kernels;
  const std::int64_t ld = run_.tiling.stride;
  if (dots_.used()) {
    dots_.scores(kernels, rows, keys, b_.p, b_.ds);
    if (!scores_are_plain()) kernels.scale_rows(rows, padded(keys), b_.p, ld, problem_.softmax_scale());
    return;
  }
  for (std::int64_t first = 0; first < keys; first += kPanel) {
    const std::int64_t columns = padded(std::min(kPanel, keys - first));
    kernels.matmul(rows, columns, problem_.head_dim_qk, {b_.q, d_, 1}, b_.k_t + first * d_, kPanel, b_.p + first, ld,
                   false, nullptr);
    kernels.matmul(rows, columns, problem_.head_dim_v, {b_.dout, dv_, 1}, b_.v_t + first * dv_, kPanel, b_.ds + first,
                   ld, false, nullptr);
  }
}

bool BackwardUnit::scores_to_probabilities(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows,
                                           std::int64_t keys) {
  const std::int64_t ld = run_.tiling.stride;
  if (b_.slope) std::fill_n(b_.slope, rows * ld, 1.0F);
  if (problem_.softcap > 0.0F) run_.kernels.softcap(rows * ld, problem_.softcap, b_.p, b_.slope);
  tile_ = {b_.p, ld, 1, rows, keys, b_.query_position, b_.key_position, b_.head, sequence_.batch};
  if (run_.scores.per_element()) run_.scores.apply(tile_, b_.slope);
  const bool masked = hide(head, block, begin, rows, keys);
  run_.kernels.exp_rows(rows, padded(keys), b_.p, ld, run_.rows.shift + run_.rows.at(head, sequence_.q_first + begin));
  return masked;
}

bool BackwardUnit::hide(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows,
                        std::int64_t keys) {
  tile_ = {b_.p, run_.tiling.stride, 1, rows, keys, b_.query_position, b_.key_position, b_.head, sequence_.batch};
  bool masked = hide_empty_rows(head, begin, rows, keys);
  masked |= hide_spans(head, block, rows);
  if (has_window(problem_)) masked |= hide_outside_window(rows, keys);
  return masked;
}

/// A row whose LSE is −∞ has no gradients, even if the backward's own list shows it keys.
bool BackwardUnit::hide_empty_rows(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys) {
  const float* shift = run_.rows.shift + run_.rows.at(head, sequence_.q_first + begin);
  bool masked = false;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (shift[i] != -kHidden) continue;
    masked = true;
    std::fill_n(b_.p + i * run_.tiling.stride, keys, kHidden);
  }
  return masked;
}

bool BackwardUnit::hide_spans(std::int64_t head, std::int64_t block, std::int64_t rows) {
  if (!run_.list.active() && !run_.scores.has_mask()) return false;
  bool masked = false;
  for (std::int64_t s = 0; s < span_count_; ++s) {
    const Span& span = b_.spans[s];
    const std::int64_t end = std::min(span.row + span.count, tile_.keys);
    if (span.row >= end) continue;
    TileClass listed = run_.list.active() ? run_.list.at(sequence_.batch, head, block, span.block) : TileClass::partial;
    if (listed == TileClass::partial && run_.scores.has_mask()) {
      listed = run_.scores.classify(sequence_.batch, head, b_.query_position[0], b_.query_position[rows - 1] + 1,
                                    span.position, span.position + span.count);
    } else if (listed == TileClass::partial) {
      listed = TileClass::full;
    }
    if (listed == TileClass::full) continue;
    masked = true;
    ScoreTile part = tile_;
    part.s = b_.p + span.row;
    part.keys = end - span.row;
    part.key_position = b_.key_position + span.row;
    if (listed == TileClass::partial) {
      run_.scores.mask(part);
      continue;
    }
    for (std::int64_t i = 0; i < rows; ++i) std::fill_n(part.s + i * part.query_stride, part.keys, kHidden);
  }
  return masked;
}

bool BackwardUnit::hide_outside_window(std::int64_t rows, std::int64_t keys) {
  bool masked = false;
  for (std::int64_t s = 0; s < span_count_; ++s) {
    const Span& span = b_.spans[s];
    const std::int64_t last = span.position + std::min(span.count, keys - span.row) - 1;
    if (last < span.position) continue;
    for (std::int64_t i = 0; i < rows; ++i) {
      const Visible visible = visible_keys(problem_, b_.query_position[i]);
      if (visible.low <= span.position && visible.high >= last) continue;
      masked = true;
      float* row = b_.p + i * run_.tiling.stride + span.row;
      const std::int64_t low = visible.low <= span.position ? span.position : std::min(visible.low, last + 1);
      const std::int64_t high = visible.high >= last ? last : std::max(visible.high, span.position - 1);
      std::fill_n(row, low - span.position, kHidden);
      std::fill_n(row + (high + 1 - span.position), last - high, kHidden);
    }
  }
  return masked;
}

void BackwardUnit::gradient_of_scores(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys) {
  const std::int64_t ld = run_.tiling.stride;
  const std::int64_t columns = padded(keys);
  const bool drops = run_.scores.has_dropout();
  if (drops) {
    run_.scores.dropout_factors(tile_, b_.keep);
    drop_gradients(rows, keys);
  }
  const std::int64_t index = run_.rows.at(head, sequence_.q_first + begin);
  const float* weight = problem_.sink && dots_.used() ? run_.rows.weight + index : nullptr;  // otherwise dO is weighted
  if (weight) weigh_rows(b_.ds, rows, columns, weight);
  const float* delta = run_.rows.delta + index;
  run_.kernels.score_gradient(rows, columns, b_.p, b_.ds, ld, delta, 1.0F, b_.ds);
  if (b_.slope) multiply(rows, keys, b_.ds, b_.slope);
  if (drops) multiply(rows, keys, b_.p, b_.keep);
  if (weight) weigh_rows(b_.p, rows, columns, weight);
}

void BackwardUnit::weigh_rows(float* a, std::int64_t rows, std::int64_t columns, const float* weight) const {
  const std::int64_t ld = run_.tiling.stride;
  for (std::int64_t i = 0; i < rows; ++i) {
    float* row = a + i * ld;
    if (!std::isnan(weight[i])) {
      run_.kernels.scale_rows(1, columns, row, ld, weight[i]);
      continue;
    }
    // In a row whose weight is NaN, the 0 of a hidden key stays 0.
    std::replace_if(
        row, row + columns, [](float x) { return x != 0.0F; }, weight[i]);
  }
}

/// The V of a dropped key has no effect, even if it is not finite.
void BackwardUnit::drop_gradients(std::int64_t rows, std::int64_t columns) const {
  for (std::int64_t i = 0; i < rows; ++i) {
    float* to = b_.ds + i * run_.tiling.stride;
    const float* keep = b_.keep + i * run_.tiling.stride;
    for (std::int64_t j = 0; j < columns; ++j) to[j] = keep[j] == 0.0F ? 0.0F : to[j] * keep[j];
  }
}

void BackwardUnit::multiply(std::int64_t rows, std::int64_t columns, float* a, const float* b) const {
  for (std::int64_t i = 0; i < rows; ++i) {
    float* to = a + i * run_.tiling.stride;
    const float* by = b + i * run_.tiling.stride;
    for (std::int64_t j = 0; j < columns; ++j) to[j] = to[j] == 0.0F ? 0.0F : to[j] * by[j];
  }
}

void BackwardUnit::products(bool masked, std::int64_t rows, std::int64_t keys, float* dq) {
  const std::int64_t ld = run_.tiling.stride;
  const bool finite = !masked || (keys_finite_ && run_.kernels.all_finite(rows * d_, b_.q) &&
                                  run_.kernels.all_finite(rows * dv_, b_.dout));
  const auto product = [&](std::int64_t m, std::int64_t n, std::int64_t k, Broadcast a, const float* b, float* c) {
    if (finite) {
      run_.kernels.matmul(m, n, k, a, b, n, c, n, true, nullptr);
    } else {
      careful_matmul(run_.kernels, SkipZerosOf::a, m, n, k, a, b, n, c, n, true, nullptr);
    }
  };
  product(keys, dv_, rows, {b_.p, 1, ld}, b_.dout, b_.dv);
  product(keys, d_, rows, {b_.ds, 1, ld}, b_.q, b_.dk);
  product(rows, d_, keys, {b_.ds, ld, 1}, b_.k, dq);
}

}  // namespace tessera::cpu
