// SPDX-License-Identifier: Apache-2.0
// A step of the forward's online softmax, one panel of queries against a run of keys: scores, masks, probabilities,
// values.

#include <algorithm>

#include "cpu/forward/unit.h"
#include "cpu/scores/non_finite.h"

namespace tessera::cpu {

void ForwardUnit::panel_step(std::int64_t first_column, std::int64_t live, Rows run, bool window) {
  const auto [first, end] = run;
  const Kernels& kernels = run_.kernels;
  const std::int64_t columns = padded(live);
  float* s = b_.s + first * kPanel;
  // With dot products the exponential applies the scale, unless something reads the scores before.
  const float scale = run_.dots ? problem_.softmax_scale() : 1.0F;
  const bool plain = !run_.scores.per_element() && problem_.softcap <= 0.0F && scale > 0.0F;
  scores(first_column, columns, first, end);
  if (!plain && scale != 1.0F) kernels.scale_rows(end - first, columns, s, kPanel, scale);
  if (problem_.softcap > 0.0F) kernels.softcap((end - first) * kPanel, problem_.softcap, s, nullptr);
  ScoreTile tile{s,
                 1,
                 kPanel,
                 live,
                 end - first,
                 b_.position + first_column,
                 b_.keys.position + first,
                 b_.head + first_column,
                 sequence_.batch};
  if (run_.scores.per_element()) run_.scores.apply(tile, nullptr);
  bool masked = window || run_.scores.has_dropout();  // a dropped key weighs 0 too
  if (window) mask_window(first_column, columns, first, end);
  if (run_.scores.has_mask()) masked |= mask_callable(tile, first, end);
  if (run_.dots) {
    probabilities_as_pairs(tile, first_column, columns, first, end, plain ? scale : 1.0F);
  } else {
    look_at_scores(tile, first_column, first, end);
    kernels.softmax_step(first, end - first, columns, s, b_.maximum + first_column, b_.sum + first_column,
                         b_.correction + first_column);
    look_at_probabilities(tile, first_column, columns, first, end);
  }
  add_values(first_column, columns, first, end, masked);
}

void ForwardUnit::scores(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end) const {
  const std::int64_t d = problem_.head_dim_qk;
  const std::int64_t in_panel = first_column % kPanel;
  const std::int64_t panel = first_column - in_panel;
  float* s = b_.s + first * kPanel;
  if (run_.dots) {
    const DotKeys& keys = b_.keys.dots;
    run_.kernels.dots->matmul(padded_tiles(end - first), columns, keys.d, keys.k + first * keys.d, keys.d,
                              b_.q_pairs + panel * keys.d / 2 + in_panel, kPanel, s, kPanel, false, nullptr);
  } else {
    run_.kernels.matmul(end - first, columns, d, {b_.keys.k + first * padded(d), padded(d), 1},
                        b_.q + panel * d + in_panel, kPanel, s, kPanel, false, nullptr);
  }
}

void ForwardUnit::mask_window(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end) {
  const Visible* visible = b_.visible + first_column;
  for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
    const Span& span = b_.keys.spans[s];
    const std::int64_t from = std::max(first, span.row);
    const std::int64_t count = std::min(end, span.row + span.count) - from;
    if (count <= 0) continue;
    mask_rows(run_.kernels, visible, columns, b_.keys.position[from], count, b_.s + from * kPanel, b_.low, b_.high);
  }
}

void mask_rows(const Kernels& kernels, const Visible* visible, std::int64_t columns, std::int64_t first,
               std::int64_t count, float* s, std::int32_t* low, std::int32_t* high) {
  for (std::int64_t c = 0; c < columns; ++c) {  // relative to the span, so that 32 bits are enough
    low[c] = static_cast<std::int32_t>(visible[c].low <= first ? 0 : std::min(visible[c].low - first, count));
    high[c] =
        static_cast<std::int32_t>(visible[c].high < first ? -1 : std::min(visible[c].high, first + count - 1) - first);
  }
  kernels.mask_window(count, columns, s, low, high);
}

bool ForwardUnit::mask_callable(ScoreTile tile, std::int64_t first, std::int64_t end) const {
  bool asked = false;
  for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
    const Span& span = b_.keys.spans[s];
    const std::int64_t from = std::max(first, span.row);
    const std::int64_t to = std::min(end, span.row + span.count);
    for (std::int64_t row = from, past = to; row < to; row = past) {
      const TileClass part = part_class(tile.head - b_.head, tile.queries, span, row, past);
      past = std::min(past, to);
      if (part == TileClass::full) continue;
      tile.s = b_.s + row * kPanel;
      tile.keys = past - row;
      tile.key_position = b_.keys.position + row;
      run_.scores.mask(tile);
      asked = true;
    }
  }
  return asked;
}

void ForwardUnit::probabilities_as_pairs(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns,
                                         std::int64_t first, std::int64_t end, float scale) {
  const Kernels& kernels = run_.kernels;
  const std::int64_t even = first / 2 * 2;
  const std::int64_t past = (end + 1) / 2 * 2;
  if (even < first) std::fill_n(b_.s + even * kPanel, columns, kNothing);
  if (past > end) std::fill_n(b_.s + end * kPanel, columns, kNothing);
  float* s = b_.s + even * kPanel;
  std::uint32_t* p = b_.p + even / 2 * kPanel;
  float* maximum = b_.maximum + first_column;
  // With fp32 outputs the largest probability must be exactly 1, because P is rounded for the product, not for the sum.
  if (gathers_mass(problem_) || run_.scores.has_dropout() || problem_.o_type == DType::fp32) {
    if (scale != 1.0F) kernels.scale_rows(past - even, columns, s, kPanel, scale);
    look_at_scores(tile, first_column, first, end);
    kernels.softmax_step(even, past - even, columns, s, maximum, b_.sum + first_column, b_.correction + first_column);
    look_at_probabilities(tile, first_column, columns, first, end);
    kernels.round_pairs(past - even, columns, s, kPanel, p);
  } else {
    kernels.softmax_pairs(past - even, columns, s, scale, maximum, b_.sum + first_column, b_.correction + first_column,
                          p);
  }
  const auto clear = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t pair = from / 2; pair < to / 2; ++pair) std::fill_n(b_.p + pair * kPanel, columns, 0U);
  };
  clear(first / kDotStep * kDotStep, even);
  clear(past, padded_dots(end));
}

void ForwardUnit::look_at_scores(const ScoreTile& tile, std::int64_t first_column, std::int64_t first,
                                 std::int64_t end) {
  if (problem_.skip.kind != SkipRule::Kind::threshold) return;
  const Strip& strip = strip_of(first_column);
  strip.mass->add_scores(b_.keys, first, end, first_column - strip.first_column, tile.queries, b_.s);
}

void ForwardUnit::look_at_probabilities(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns,
                                        std::int64_t first, std::int64_t end) {
  if (gathers_mass(problem_) && problem_.skip.kind != SkipRule::Kind::threshold) {
    const Strip& strip = strip_of(first_column);
    strip.mass->add(b_.keys, first, end, first_column - strip.first_column, tile.queries, b_.s,
                    b_.maximum + first_column);
  }
  if (run_.scores.has_dropout()) drop(tile, columns);
}

void ForwardUnit::drop(const ScoreTile& tile, std::int64_t columns) const {
  run_.scores.dropout_factors(tile, b_.keep);
  for (std::int64_t row = 0; row < tile.keys; ++row) {
    for (std::int64_t c = 0; c < std::min(columns, tile.queries); ++c) {
      tile.s[row * kPanel + c] *= b_.keep[row * kPanel + c];
    }
  }
}

void ForwardUnit::add_values(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end,
                             bool masked) {
  const Kernels& kernels = run_.kernels;
  const std::int64_t in_panel = first_column % kPanel;
  float* o = b_.o + (first_column - in_panel) * dv_ + in_panel;
  const float* correction = b_.correction + first_column;
  if (run_.dots) {
    const DotKeys& keys = b_.keys.dots;
    const std::int64_t from = first / kDotStep * kDotStep;
    const std::int64_t to = padded_dots(end);
    masked |= from < first || end < to;
    if (masked && !keys.values_finite(from, to)) {
      careful_dots(SkipZerosOf::b, dv_, columns, to - from, keys.v_t + from, keys.rows, b_.p + from / 2 * kPanel,
                   kPanel, o, kPanel, correction);
    } else {
      kernels.dots->matmul(keys.dv, columns, to - from, keys.v_t + from, keys.rows, b_.p + from / 2 * kPanel, kPanel, o,
                           kPanel, true, correction);
    }
    return;
  }
  const Broadcast v{b_.keys.v + first * dv_, 1, dv_};
  float* s = b_.s + first * kPanel;
  if (masked && !kernels.all_finite((end - first) * dv_, b_.keys.v + first * dv_)) {
    careful_matmul(kernels, SkipZerosOf::b, problem_.head_dim_v, columns, end - first, v, s, kPanel, o, kPanel, true,
                   correction);
  } else {
    kernels.matmul(problem_.head_dim_v, columns, end - first, v, s, kPanel, o, kPanel, true, correction);
  }
}

}  // namespace tessera::cpu
