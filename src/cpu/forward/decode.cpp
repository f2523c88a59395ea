// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <limits>

#include "cpu/forward/decode_unit.h"

namespace tessera::cpu {
namespace {

// Lists the rows of keys [first, first + count) of a view.
void list_rows(const KeyView& view, std::int64_t first, std::int64_t count, std::int64_t head, KeyRow* rows) {
  while (count > 0) {
    const std::int64_t run = view.run(first, count);
    const std::byte* at = view.at(first, head);
    for (std::int64_t i = 0; i < run; ++i) *rows++ = {at + i * view.row, view.head};
    first += run;
    count -= run;
  }
}

constexpr Visible kSeesAll = {std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};

std::int64_t row_bytes(std::int64_t dim, DType type) { return dim * static_cast<std::int64_t>(size_of(type)); }

}  // namespace

DecodeBuffers DecodeBuffers::place(Arena& arena, const Problem& problem, const Tiling& tiling, bool dots) {
  DecodeBuffers b{};
  b.columns = padded(tiling.tiles_a_unit * kDecodeQueries);
  const std::int64_t panels = (b.columns + kPanel - 1) / kPanel;
  b.rows_s = (tiling.tile_kv + kDecodeKeys - 1) / kDecodeKeys * kDecodeKeys;
  if (dots) {
    b.q_bf16 = arena.take<std::uint16_t>(b.columns * problem.head_dim_qk);
    b.p = arena.take<std::uint32_t>(panels * b.rows_s / 2 * kPanel);
    b.zeros = arena.take<std::byte>(2 * std::max(problem.head_dim_qk, problem.head_dim_v));
  } else {
    b.q = arena.take<float>(b.columns * padded(problem.head_dim_qk));
  }
  b.o = arena.take<float>(b.columns * padded(problem.head_dim_v));
  if (!dots) b.step_o = arena.take<float>(b.columns * padded(problem.head_dim_v));
  b.s = arena.take<float>(panels * b.rows_s * kPanel);
  b.maximum = arena.take<float>(b.columns);
  b.sum = arena.take<float>(b.columns);
  b.correction = arena.take<float>(b.columns);
  b.position = arena.take<std::int64_t>(b.columns);
  b.visible = arena.take<Visible>(b.columns);
  b.head = arena.take<std::int32_t>(b.columns);
  b.low = arena.take<std::int32_t>(kPanel);
  b.high = arena.take<std::int32_t>(kPanel);
  b.k = arena.take<KeyRow>(b.rows_s);
  b.v = arena.take<KeyRow>(b.rows_s);
  b.next = arena.take<KeyRow>(kDecodeKeys);
  b.rows = arena.take<const std::byte*>(kDecodeKeys);
  b.ahead = arena.take<const std::byte*>(tiling.tiles_a_unit * kDecodeKeys);
  b.keys.spans = arena.take<Span>(tiling.tile_kv + 1);
  b.keys.position = arena.take<std::int64_t>(b.rows_s);
  return b;
}

std::size_t decode_thread_bytes(const Problem& problem, const Tiling& tiling, bool dots) {
  Arena arena;
  DecodeBuffers::place(arena, problem, tiling, dots);
  return arena.used();
}

bool DecodeUnit::takes(const ForwardRun& run, const Sequence& sequence) {
  const Tiling& t = run.tiling;
  return run.reads_in_place && std::min(t.rows, sequence.q_length) * t.heads_a_tile <= kDecodeQueries;
}

void DecodeUnit::compute(const Sequence& sequence, const StripRows& rows, std::int64_t first_tile, std::int64_t tiles,
                         std::int64_t split) {
  const Tiling& t = run_.tiling;
  const std::int64_t head = first_tile * t.heads_a_tile;
  sequence_ = sequence;
  tiles_ = tiles;
  split_ = split;
  for (std::int64_t h = head; t.splits == 1 && h < head + tiles * t.heads_a_tile; ++h) {
    write_empty_rows(problem_, run_.bindings, run_.kernels, sequence, h, std::max(rows.begin, rows.used), rows.end,
                     b_.o);
  }
  if (rows.begin >= rows.used) return;
  first_row_ = rows.begin;
  row_count_ = rows.used - rows.begin;
  const std::int64_t position = sequence.q_position + rows.begin;
  tile_ = {sequence.batch, head, rows.block, position, position + row_count_ - 1};
  queries_ = row_count_ * t.heads_a_tile;
  stride_ = (queries_ + 3) / 4 * 4;
  load_queries();
  walk_keys();
  finish();
}

void DecodeUnit::load_queries() {
  const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
  const std::int64_t d = problem_.head_dim_qk;
  const std::int64_t width = padded(columns());
  if (run_.dots) {
    std::fill_n(b_.q_bf16, width * d, std::uint16_t{0});
    std::fill_n(b_.zeros, 2 * std::max(d, problem_.head_dim_v), std::byte{0});
  } else {
    std::fill_n(b_.q, width * d, 0.0F);
  }
  std::fill_n(b_.o, width * problem_.head_dim_v, 0.0F);
  std::fill_n(b_.maximum, width, kNothing);
  std::fill_n(b_.sum, width, 0.0F);
  // The softmax computes unused columns too. What earlier units left there must not affect decisions about all columns.
  const std::int64_t scored = queries_ == 1 ? -tiles_ : columns();
  if (scored != cleared_ || !run_.tiling.all_decode) {
    std::fill_n(b_.s, (width + kPanel - 1) / kPanel * b_.rows_s * kPanel, 0.0F);
  }
  cleared_ = scored;
  for (std::int64_t c = 0; c < width; ++c) {
    const std::int64_t tile = std::min(c / stride_, tiles_ - 1);
    const std::int64_t query = std::min(c % stride_, queries_ - 1);
    const std::int64_t row = query % row_count_;
    const std::int64_t head = tile_.head + tile * run_.tiling.heads_a_tile + query / row_count_;
    b_.head[c] = static_cast<std::int32_t>(head);
    b_.position[c] = tile_.first_position + row;
    // Unused columns see every key, so that their scores stay 0 and affect no decision.
    const bool used = c < columns() && c % stride_ < queries_;
    b_.visible[c] = used ? visible_keys(problem_, b_.position[c]) : kSeesAll;
    if (!used) continue;
    if (run_.dots) {
      copy_rows(q.at(first_row_ + row, head), 0, 1, d, b_.q_bf16 + c * d, d);
    } else {
      run_.kernels.load_row(problem_.q_type, q.at(first_row_ + row, head), d, problem_.softmax_scale(), b_.q + c * d,
                            d);
    }
  }
  // Both limits grow with the position.
  seen_by_all_ = {visible_keys(problem_, tile_.last_position).low, visible_keys(problem_, tile_.first_position).high};
}

void DecodeUnit::walk_keys() {
  const Tiling& t = run_.tiling;
  KeyTile& keys = b_.keys;
  const std::int64_t key_tiles = (sequence_.keys() + t.tile_kv - 1) / t.tile_kv;
  const std::int64_t last = std::min(key_tiles, (split_ + 1) * t.key_tiles_a_split);
  for (keys.index = split_ * t.key_tiles_a_split; keys.index < last && !run_.workers.stopped(); ++keys.index) {
    keys.index = run_.key_tiles.skip(sequence_, tile_, keys.index, last);
    if (keys.index == last) break;
    if (!run_.key_tiles.collect(sequence_, tile_, keys)) continue;
    for (std::int64_t s = 0; s < keys.span_count;) {
      const std::int64_t first = s;
      const std::int64_t row = keys.spans[s].row;
      std::int64_t count = 0;
      while (s < keys.span_count && keys.spans[s].row == row + count) count += keys.spans[s++].count;
      step(first, s);
    }
  }
}

void DecodeUnit::step(std::int64_t first, std::int64_t last) {
  const std::int64_t dv = problem_.head_dim_v;
  find_rows(first, last);
  const float scale = score();
  const bool masked = has_window(problem_) && mask_window(first, last);
  softmax(scale);
  if (run_.dots) {
    for (std::int64_t c = 0; c < columns(); ++c) {
      if (b_.correction[c] != 1.0F) run_.kernels.scale_rows(1, dv, b_.o + c * dv, 0, b_.correction[c]);
    }
  } else {
    std::fill_n(b_.step_o, columns() * dv, 0.0F);
  }
  if (masked) {
    add_masked_values();
  } else {
    add_values(0, rows_);
  }
  for (std::int64_t c = 0; !run_.dots && c < columns(); ++c) {
    run_.kernels.add_row(dv, b_.correction[c], b_.step_o + c * dv, b_.o + c * dv);
  }
}

void DecodeUnit::find_rows(std::int64_t first, std::int64_t last) {
  const std::int64_t kv_head = tile_.head / problem_.group();
  std::int64_t row = 0;
  const auto add_zeros = [&] { b_.k[row] = b_.v[row] = {b_.zeros, 0}, ++row; };
  lead_ = b_.keys.spans[first].row % together_;
  place_ = b_.keys.spans[first].row - lead_;
  while (row < lead_) add_zeros();
  for (std::int64_t s = first; s < last; ++s) {
    const Span& span = b_.keys.spans[s];
    const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
    list_rows(source.k, span.first, span.count, kv_head, b_.k + row);
    list_rows(source.v, span.first, span.count, kv_head, b_.v + row);
    for (std::int64_t i = 0; i < span.count; ++i) b_.keys.position[row++] = span.position + i;
  }
  keys_ = row - lead_;
  while (row % together_ > 0) add_zeros();
  rows_ = row;
  const bool more = last < b_.keys.span_count;
  const Span& span = b_.keys.spans[more ? last : last - 1];
  const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
  const std::int64_t from = more ? span.first : span.first + span.count;
  next_ = std::min(kDecodeKeys, more ? span.count : run_.list.active() ? 0 : source.length - from);
  list_rows(source.k, from, next_, kv_head, b_.next);
}

RowsAhead DecodeUnit::find_ahead(const KeyRow* rows, std::int64_t count, std::int64_t bytes) {
  // Lists the rows in the order of their addresses.
  const bool heads_apart = count > 1 && std::abs(rows[0].head) > std::abs(rows[1].row - rows[0].row);
  const std::ptrdiff_t key_step = heads_apart ? 1 : tiles_;
  const std::ptrdiff_t tile_step = heads_apart ? count : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* row = rows[i].row;
    for (std::int64_t tile = 0; tile < tiles_; ++tile, row += rows[i].head) {
      b_.ahead[i * key_step + tile * tile_step] = row;
    }
  }
  return {b_.ahead, count, bytes};
}

template <class Task>
void DecodeUnit::for_rows(const KeyRow* rows, std::int64_t count, std::int64_t bytes, const KeyRow* next,
                          std::int64_t next_count, std::int64_t next_bytes, const Task& task) {
  for (std::int64_t first = 0; first < count; first += kDecodeKeys) {
    const std::int64_t keys = std::min(kDecodeKeys, count - first);
    const std::int64_t rest = count - first - keys;
    RowsAhead ahead = rest > 0 ? find_ahead(rows + first + keys, std::min(kDecodeKeys, rest), bytes)
                               : find_ahead(next, std::min(kDecodeKeys, next_count), next_bytes);
    for (std::int64_t tile = 0; tile < tiles_; ++tile) {
      for (std::int64_t i = 0; i < keys; ++i) b_.rows[i] = rows[first + i].row + tile * rows[first + i].head;
      task(tile, first, keys, ahead);
      ahead.rows += ahead.count;
    }
  }
}

float DecodeUnit::score() {
  const Kernels& kernels = run_.kernels;
  const std::int64_t d = problem_.head_dim_qk;
  const std::int64_t queries = queries_ == 1 ? 1 : stride_;
  for_rows(b_.k, rows_, row_bytes(d, problem_.k_type), b_.v, rows_, row_bytes(problem_.head_dim_v, problem_.v_type),
           [&](std::int64_t tile, std::int64_t first, std::int64_t keys, const RowsAhead& ahead) {
             const std::int64_t c = tile * stride_;
             float* s = scores_at(c, first);
             if (run_.dots) {
               kernels.dots->decode_scores(keys, b_.rows, d, queries, b_.q_bf16 + c * d, s, ahead, kernels.transpose);
             } else {
               kernels.decode_scores(problem_.k_type, keys, b_.rows, d, queries, b_.q + c * d, s, ahead);
             }
           });
  // With dot products the exponential applies the scale, unless something reads the scores before.
  float scale = run_.dots ? problem_.softmax_scale() : 1.0F;
  const bool plain = !run_.scores.per_element() && problem_.softcap <= 0.0F && scale > 0.0F;
  const std::int64_t width = padded(columns());
  for (std::int64_t c = 0; c < width; c += kPanel) {
    float* s = scores_at(c, lead_);
    if (!plain && scale != 1.0F) kernels.scale_rows(keys_, std::min(kPanel, width - c), s, kPanel, scale);
    if (problem_.softcap > 0.0F) kernels.softcap(keys_ * kPanel, problem_.softcap, s, nullptr);
  }
  for (std::int64_t c = 0; run_.scores.per_element() && c < columns(); c += stride_) {
    run_.scores.apply({scores_at(c, lead_), 1, kPanel, queries_, keys_, b_.position + c, b_.keys.position + lead_,
                       b_.head + c, sequence_.batch},
                      nullptr);
  }
  return plain ? scale : 1.0F;
}

bool DecodeUnit::mask_window(std::int64_t first, std::int64_t last) {
  bool masked = false;
  std::int64_t row = lead_;
  for (std::int64_t s = first; s < last; row += b_.keys.spans[s++].count) {
    const Span& span = b_.keys.spans[s];
    if (span.position >= seen_by_all_.low && span.position + span.count - 1 <= seen_by_all_.high) continue;
    masked = true;
    const std::int64_t width = padded(columns());
    for (std::int64_t c = 0; c < width; c += kPanel) {
      mask_rows(run_.kernels, b_.visible + c, std::min(kPanel, width - c), span.position, span.count, scores_at(c, row),
                b_.low, b_.high);
    }
  }
  return masked;
}

void DecodeUnit::softmax(float scale) {
  const std::int64_t width = padded(columns());
  for (std::int64_t c = 0; c < width; c += kPanel) {
    const std::int64_t columns = std::min(kPanel, width - c);
    if (!run_.dots) {
      run_.kernels.softmax_step(place_, rows_, columns, scores_at(c, 0), b_.maximum + c, b_.sum + c, b_.correction + c);
      continue;
    }
    // Works on whole pairs of keys, as ForwardUnit does: the order of the sum depends on where it starts.
    const std::int64_t first = lead_ / 2 * 2, end = lead_ + keys_, past = (end + 1) / 2 * 2;
    const auto fill_halves = [&](float value) {
      if (first < lead_) std::fill_n(scores_at(c, first), columns, value);
      if (end < past) std::fill_n(scores_at(c, end), columns, value);
    };
    fill_halves(kNothing);
    float* s = scores_at(c, first);
    if (problem_.o_type == DType::fp32) {  // ForwardUnit does the same
      if (scale != 1.0F) run_.kernels.scale_rows(past - first, columns, s, kPanel, scale);
      run_.kernels.softmax_step(place_ + first, past - first, columns, s, b_.maximum + c, b_.sum + c,
                                b_.correction + c);
      run_.kernels.round_pairs(past - first, columns, s, kPanel, pairs_at(c, first));
    } else {
      run_.kernels.softmax_pairs(past - first, columns, s, scale, b_.maximum + c, b_.sum + c, b_.correction + c,
                                 pairs_at(c, first));
    }
    fill_halves(0.0F);  // scores of unused columns must stay 0
    for (std::int64_t row = 0; row < first; row += 2) std::fill_n(pairs_at(c, row), columns, 0U);
    for (std::int64_t row = past; row < rows_; row += 2) std::fill_n(pairs_at(c, row), columns, 0U);
  }
}

void DecodeUnit::multiply_values(std::int64_t keys, const std::byte* const* rows, std::int64_t queries,
                                 std::int64_t column, std::int64_t row, const RowsAhead& ahead) const {
  const Kernels& kernels = run_.kernels;
  const std::int64_t dv = problem_.head_dim_v;
  if (run_.dots) {
    kernels.dots->decode_values(keys / 2, rows, dv, queries, pairs_at(column, row), b_.o + column * dv, ahead);
  } else {
    kernels.decode_values(problem_.v_type, keys, rows, dv, queries, scores_at(column, row), b_.step_o + column * dv,
                          ahead);
  }
}

void DecodeUnit::add_values(std::int64_t first, std::int64_t end) {
  const std::int64_t queries = queries_ == 1 ? 1 : stride_;
  for_rows(b_.v + first, end - first, row_bytes(problem_.head_dim_v, problem_.v_type), b_.next,
           end == rows_ ? next_ : 0, row_bytes(problem_.head_dim_qk, problem_.k_type),
           [&](std::int64_t tile, std::int64_t from, std::int64_t keys, const RowsAhead& ahead) {
             multiply_values(keys, b_.rows, queries, tile * stride_, first + from, ahead);
           });
}

void DecodeUnit::add_masked_values() {
  const auto seen = [&](std::int64_t row) {
    if (row < lead_ || row >= lead_ + keys_) return true;  // a row of zeros, whose weight is 0
    return b_.keys.position[row] >= seen_by_all_.low && b_.keys.position[row] <= seen_by_all_.high;
  };
  const auto all_seen = [&](std::int64_t row) {
    const std::int64_t end = row + together_;
    while (row < end && seen(row)) ++row;
    return row == end;
  };
  for (std::int64_t row = 0; row < rows_;) {
    std::int64_t end = row;
    while (end < rows_ && all_seen(end)) end += together_;
    if (end > row) {
      add_values(row, end);
      row = end;
      continue;
    }
    for (std::int64_t tile = 0; tile < tiles_; ++tile) add_masked_value(row, tile);
    row += together_;
  }
}

void DecodeUnit::add_masked_value(std::int64_t row, std::int64_t tile) {
  for (std::int64_t c = tile * stride_; c < tile * stride_ + queries_; ++c) {
    const auto value = [&](std::int64_t at, bool weighs) {
      return weighs ? b_.v[at].row + tile * b_.v[at].head : b_.zeros;
    };
    const std::byte* rows[kDecodeKeys];
    for (std::int64_t i = 0; run_.dots && i < together_; i += 2) {
      const std::uint32_t pair = *pairs_at(c, row + i);
      rows[i] = value(row + i, (pair & 0xFFFFU) != 0);
      rows[i + 1] = value(row + i + 1, pair >> 16U != 0);
    }
    if (!run_.dots) {
      if (*scores_at(c, row) == 0.0F) continue;
      rows[0] = value(row, true);
    }
    multiply_values(together_, rows, 1, c, row, {});
  }
}

void DecodeUnit::finish() {
  const ResultRows results(run_, sequence_);
  for (std::int64_t tile = 0; tile < tiles_; ++tile) {
    for (std::int64_t i = 0; i < queries_; ++i) {
      const std::int64_t c = tile * stride_ + i;
      results.write(split_, b_.head[c], first_row_ + i % row_count_, b_.maximum[c], b_.sum[c],
                    b_.o + c * problem_.head_dim_v);
    }
  }
}

}  // namespace tessera::cpu
