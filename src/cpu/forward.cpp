// SPDX-License-Identifier: Apache-2.0
// Forward: blocked online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Scores are computed transposed, keys
// down and queries across, so that maxima, sums and rescaling are vertical vector operations and neither K nor V has
// to be packed: their elements are broadcast against panels of 64 queries.

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "cpu/careful.h"
#include "cpu/forward_buffers.h"
#include "cpu/merge.h"
#include "cpu/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kBandStrip = 32;  // queries; a divisor of kPanel

// Everything that all units of one run share.
struct ForwardRun {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  const bool dots;
  Tiling tiling;
  ScoreStage scores;
  TileListReader list;
  const bool few;
  KeyTiles key_tiles;
  PartialResults partials;  // splits > 1

  ForwardRun(const detail::PlanState& state, const Bindings& bound)
      : problem(state.problem),
        bindings(bound),
        kernels(kernels_for(state.target.isa)),
        dots(uses_dots(state.problem, kernels)),
        tiling(tiling_of(state)),
        scores(state.problem, bound),
        list(state.problem, bound, false),
        few(reads_in_place(problem)),
        key_tiles(problem, scores, list, tiling.tile_kv) {}

  // Whether few queries may read keys where they lie: the sums are those of fp32, no weight becomes 0 after the scores,
  // and no one else looks at keys or weights.
  [[nodiscard]] bool reads_in_place(const Problem& p) const {
    return !dots && !scores.has_mask() && !scores.has_dropout() && !gathers_mass(p) && p.head_dim_qk % kPad == 0 &&
           p.head_dim_v % kPad == 0;
  }
};

class ForwardUnit {
 public:
  ForwardUnit(const ForwardRun& run, ForwardBuffers& buffers)
      : run_(run), problem_(run.problem), b_(buffers), dv_(padded(problem_.head_dim_v)) {}

  void compute(std::int64_t batch, std::int64_t head_tile, std::int64_t row_unit, std::int64_t split) {
    const Tiling& t = run_.tiling;
    sequence_ = find_sequence(problem_, run_.bindings, batch);
    head_ = head_tile * t.heads_a_tile;
    split_ = split;
    const bool mass = gathers_mass(problem_);
    if (mass) b_.mass.begin_block();
    const std::int64_t first = row_unit * t.unit_strips;
    for (std::int64_t strip = first; strip < first + t.unit_strips; strip += t.strips) {
      strip_count_ = 0;
      for (std::int64_t i = strip; i < strip + t.strips; ++i) add_strip(i);
      if (strip_count_ > 0) walk_keys();
    }
    if (mass) b_.mass.end_block(problem_, run_.bindings, batch, head_, first / t.block_strips);
  }

 private:
  // Strip `index` of the sequence, if it has rows; rows past the used length are written as empty.
  void add_strip(std::int64_t index) {
    const Tiling& t = run_.tiling;
    const std::int64_t block = index / t.block_strips;
    const std::int64_t begin = block * t.block_rows + index % t.block_strips * t.rows;
    const std::int64_t end = std::min({begin + t.rows, (block + 1) * t.block_rows, sequence_.q_capacity});
    const std::int64_t used = std::min(end, sequence_.q_length);
    if (t.splits == 1) write_padding(std::max(begin, used), end);
    if (begin >= used) return;
    const std::int64_t position = sequence_.q_position + begin;
    b_.strips[strip_count_] = {begin,
                               used - begin,
                               strip_count_ * t.strip_columns,
                               (used - begin) * t.heads_a_tile,
                               {sequence_.batch, head_, block, position, position + used - begin - 1}};
    load_queries(b_.strips[strip_count_++]);
  }

  void walk_keys() {
    const Tiling& t = run_.tiling;
    const std::int64_t cells = (sequence_.keys() + t.tile_kv - 1) / t.tile_kv;
    const std::int64_t last = std::min(cells, (split_ + 1) * t.cells_a_split);
    if (gathers_mass(problem_)) b_.mass.begin_tile();
    for (std::int64_t cell = split_ * t.cells_a_split; cell < last; ++cell) {
      std::int64_t next = last;
      for (std::int64_t i = 0; i < strip_count_; ++i) {
        next = std::min(next, run_.key_tiles.skip(sequence_, b_.strips[i].queries, cell, last));
      }
      if (next == last) break;
      cell = next;
      run_.key_tiles.begin(cell, b_.keys);
      for (std::int64_t i = 0; i < strip_count_; ++i) {
        if (run_.key_tiles.collect(sequence_, b_.strips[i].queries, b_.keys)) key_tile(b_.strips[i]);
      }
    }
    for (std::int64_t i = 0; i < strip_count_; ++i) finish(b_.strips[i]);
  }

  // Q transposed into panels; positions and limits of every column.
  void load_queries(const Strip& strip) {
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

  void load_panel(const Strip& strip, std::int64_t first) {
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

  [[nodiscard]] bool is_few(const Strip& strip) const { return run_.few && strip.columns <= kFewQueries; }

  // Few queries as rows of fp32.
  void load_rows(const Strip& strip) {
    const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
    const std::int64_t d = problem_.head_dim_qk;
    float* target = q_rows(strip.first_column);
    std::fill_n(target, kFewQueries * d, 0.0F);
    for (std::int64_t c = 0; c < strip.columns; ++c) {
      const std::byte* source = q.at(strip.first_row + c % strip.rows, b_.head[strip.first_column + c]);
      run_.kernels.load_row(problem_.q_type, source, d, problem_.softmax_scale(), target + c * d, d);
    }
  }

  [[nodiscard]] float* q_rows(std::int64_t first_column) const {
    return b_.q_rows + first_column / run_.tiling.strip_columns * kFewQueries * problem_.head_dim_qk;
  }

  // A strip against the spans collected for it; spans without a gap between them are one step of the softmax.
  void key_tile(const Strip& strip) {
    const KeyTile& keys = b_.keys;
    const std::int64_t first_row = keys.spans[0].row;
    const Span& last = keys.spans[keys.span_count - 1];
    const bool few = is_few(strip) && (!has_band(problem_) ||
                                       sees_all(strip.first_column, strip.columns, {first_row, last.row + last.count}));
    if (!few) run_.key_tiles.load(run_.kernels, sequence_, head_ / problem_.group(), b_.keys);
    for (std::int64_t s = 0; s < keys.span_count;) {
      const std::int64_t first_span = s;
      const std::int64_t first = keys.spans[s].row;
      std::int64_t end = first;
      while (s < keys.span_count && keys.spans[s].row == end) end += keys.spans[s++].count;
      if (few) {
        find_rows(first_span, s, end - first);
        panel_step(strip.first_column, strip.columns, {first, end}, false, true);
      } else {
        key_run(strip, {first, end});
      }
    }
  }

  // Where the keys of spans [first, last) lie, `count` in all, and their positions.
  void find_rows(std::int64_t first, std::int64_t last, std::int64_t count) {
    const std::int64_t kv_head = head_ / problem_.group();
    const std::byte** to = b_.rows;
    for (std::int64_t s = first; s < last; ++s) {
      const Span& span = b_.keys.spans[s];
      const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
      for (std::int64_t i = 0; i < span.count; ++i, ++to) {
        *to = source.k.at(span.first + i, kv_head);
        to[count] = source.v.at(span.first + i, kv_head);
        b_.keys.position[span.row + i] = span.position + i;
      }
    }
    // The keys behind them, most likely the next ones.
    const Span& span = b_.keys.spans[last - 1];
    const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
    const std::int64_t next = span.first + span.count;
    more_rows_ = std::min(kRowsAhead, source.length - next);
    for (std::int64_t i = 0; i < more_rows_; ++i) b_.rows[2 * count + i] = source.k.at(next + i, kv_head);
  }

  struct Rows {
    std::int64_t first;
    std::int64_t end;
  };

  void key_run(const Strip& strip, Rows run) {
    const std::int64_t last = strip.first_column + strip.columns;
    for (std::int64_t first = strip.first_column; first < last; first += kPanel) {
      const std::int64_t live = std::min(kPanel, last - first);
      if (!has_band(problem_) || sees_all(first, live, run)) {
        panel_step(first, live, run, false, false);
        continue;
      }
      // At the border of the band a narrower strip of queries leaves less of the triangle to be masked.
      for (std::int64_t part = first; part < first + live; part += kBandStrip) {
        const std::int64_t columns = std::min(kBandStrip, first + live - part);
        const Rows rows = rows_seen(part, columns, run);
        if (rows.first < rows.end) panel_step(part, columns, rows, true, false);
      }
    }
  }

  // Queries [first_column, first_column + live) of one panel against a run of the tile's keys; `few`: those of b_.rows.
  void panel_step(std::int64_t first_column, std::int64_t live, Rows run, bool band, bool few) {
    const auto [first, end] = run;
    const bool dots = run_.dots && !few;
    const Kernels& kernels = run_.kernels;
    const std::int64_t columns = padded(live);
    float* s = b_.s + first * kPanel;
    // Dot products leave the scale to the exponential, unless something looks at the scores before.
    const float scale = dots ? problem_.softmax_scale() : 1.0F;
    const bool plain = !run_.scores.per_element() && problem_.softcap <= 0.0F && scale > 0.0F;
    if (few) {
      const std::int64_t d = problem_.head_dim_qk;
      kernels.few_scores(problem_.k_type, end - first, end - first, b_.rows, d, live, q_rows(first_column), d,
                         b_.staging, s);
    } else {
      scores(first_column, columns, first, end);
    }
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
    bool masked = band || run_.scores.has_dropout();  // a dropped key weighs 0 too
    if (band) mask_band(first_column, columns, first, end);
    if (run_.scores.has_mask()) masked |= mask_callable(tile, first, end);
    if (dots) {
      probabilities_as_pairs(tile, first_column, columns, first, end, plain ? scale : 1.0F);
    } else {
      kernels.softmax_step(end - first, columns, s, b_.maximum + first_column, b_.sum + first_column,
                           b_.correction + first_column);
      look_at_probabilities(tile, first_column, columns, first, end);
    }
    if (few) {
      kernels.few_values(problem_.v_type, end - first, more_rows_, b_.rows + (end - first), dv_, live, s,
                         b_.correction + first_column, b_.staging, b_.o + first_column * dv_);
    } else {
      add_values(first_column, columns, first, end, masked);
    }
  }

  // S (keys, queries) = K·Qᵀ.
  void scores(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end) const {
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

  // Mass and dropout see the probabilities in fp32.
  void look_at_probabilities(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns, std::int64_t first,
                             std::int64_t end) {
    if (gathers_mass(problem_)) {
      b_.mass.add(b_.keys, first, end, first_column, tile.queries, b_.s, b_.maximum + first_column);
    }
    if (run_.scores.has_dropout()) drop(tile, columns);
  }

  // The softmax step, and P as pairs of keys in whole chunks: keys before the first and behind the last one weigh 0.
  void probabilities_as_pairs(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns,
                              std::int64_t first, std::int64_t end, float scale) {
    const Kernels& kernels = run_.kernels;
    const std::int64_t even = first / 2 * 2;
    const std::int64_t past = (end + 1) / 2 * 2;
    if (even < first) std::fill_n(b_.s + even * kPanel, columns, kNothing);
    if (past > end) std::fill_n(b_.s + end * kPanel, columns, kNothing);
    float* s = b_.s + even * kPanel;
    std::uint32_t* p = b_.p + even / 2 * kPanel;
    float* maximum = b_.maximum + first_column;
    if (gathers_mass(problem_) || run_.scores.has_dropout()) {
      if (scale != 1.0F) kernels.scale_rows(past - even, columns, s, kPanel, scale);
      kernels.softmax_step(past - even, columns, s, maximum, b_.sum + first_column, b_.correction + first_column);
      look_at_probabilities(tile, first_column, columns, first, end);
      kernels.round_pairs(past - even, columns, s, kPanel, p);
    } else {
      kernels.softmax_pairs(past - even, columns, s, scale, maximum, b_.sum + first_column,
                            b_.correction + first_column, p);
    }
    const auto clear = [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t pair = from / 2; pair < to / 2; ++pair) std::fill_n(b_.p + pair * kPanel, columns, 0U);
    };
    clear(first / kDotStep * kDotStep, even);
    clear(past, padded_dots(end));
  }

  // O (dv, queries) = O·correction + Vᵀ·P.
  void add_values(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end, bool masked) {
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
        kernels.dots->matmul(keys.dv, columns, to - from, keys.v_t + from, keys.rows, b_.p + from / 2 * kPanel, kPanel,
                             o, kPanel, true, correction);
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

  // Whether every one of the columns sees every key of the run.
  [[nodiscard]] bool sees_all(std::int64_t first_column, std::int64_t live, Rows run) const {
    Visible all = b_.visible[first_column];
    for (std::int64_t c = first_column + 1; c < first_column + live; ++c) {
      all = {std::max(all.low, b_.visible[c].low), std::min(all.high, b_.visible[c].high)};
    }
    for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
      const Span& span = b_.keys.spans[s];
      if (span.row < run.first || span.row >= run.end) continue;
      if (span.position < all.low || span.position + span.count - 1 > all.high) return false;
    }
    return true;
  }

  // The run's keys less those at either end that none of the columns sees.
  [[nodiscard]] Rows rows_seen(std::int64_t first_column, std::int64_t live, Rows rows) const {
    Visible some = b_.visible[first_column];
    for (std::int64_t c = first_column + 1; c < first_column + live; ++c) {
      some = {std::min(some.low, b_.visible[c].low), std::max(some.high, b_.visible[c].high)};
    }
    const auto hidden = [&](std::int64_t row) {
      return b_.keys.position[row] < some.low || b_.keys.position[row] > some.high;
    };
    while (rows.first < rows.end && hidden(rows.first)) ++rows.first;
    while (rows.first < rows.end && hidden(rows.end - 1)) --rows.end;
    return rows;
  }

  void mask_band(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end) {
    const Visible* visible = b_.visible + first_column;
    for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
      const Span& span = b_.keys.spans[s];
      const std::int64_t from = std::max(first, span.row);
      const std::int64_t count = std::min(end, span.row + span.count) - from;
      if (count <= 0) continue;
      const std::int64_t base = b_.keys.position[from];
      for (std::int64_t c = 0; c < columns; ++c) {  // relative to the span: 32 bits are enough
        b_.low[c] = static_cast<std::int32_t>(visible[c].low <= base ? 0 : std::min(visible[c].low - base, count));
        b_.high[c] =
            static_cast<std::int32_t>(visible[c].high < base ? -1 : std::min(visible[c].high, base + count - 1) - base);
      }
      run_.kernels.mask_band(count, columns, b_.s + from * kPanel, b_.low, b_.high);
    }
  }

  // Asks the mask callable where a span needs it; true if it was asked.
  bool mask_callable(ScoreTile tile, std::int64_t first, std::int64_t end) const {
    bool asked = false;
    for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
      const Span& span = b_.keys.spans[s];
      const std::int64_t from = std::max(first, span.row);
      const std::int64_t to = std::min(end, span.row + span.count);
      if (!span.user_mask || from >= to) continue;
      tile.s = b_.s + from * kPanel;
      tile.keys = to - from;
      tile.key_position = b_.keys.position + from;
      run_.scores.mask(tile);
      asked = true;
    }
    return asked;
  }

  void drop(const ScoreTile& tile, std::int64_t columns) const {
    run_.scores.dropout_factors(tile, b_.keep);
    for (std::int64_t row = 0; row < tile.keys; ++row) {
      for (std::int64_t c = 0; c < std::min(columns, tile.queries); ++c) {
        tile.s[row * kPanel + c] *= b_.keep[row * kPanel + c];
      }
    }
  }

  // Divides by the sum (and the sink), transposes back and writes O and LSE.
  void finish(const Strip& strip) {
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
        for (std::int64_t i = 0; i < dv; ++i) result[i] *= inverse;
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

  [[nodiscard]] float sink(std::int64_t head) const {
    const Tensor& sinks = run_.bindings[Slot::sink];
    return problem_.sink ? sinks.as<float>()[head * sinks.strides[0]] : kNothing;
  }

  void finish_mass(const Strip& strip) {
    if (problem_.mass_prior_lse) {
      const ScalarView prior = scalars_of(problem_, run_.bindings[Slot::prior_lse], sequence_);
      for (std::int64_t c = 0; c < strip.columns; ++c) b_.lse[c] = prior.at(strip.first_row + c, head_);
    }
    b_.mass.end_tile(strip.columns, b_.lse);
  }

  void write_padding(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t h = head_; h < head_ + run_.tiling.heads_a_tile; ++h) {
      write_empty_rows(problem_, run_.bindings, run_.kernels, sequence_, h, begin, end, b_.staging);
    }
  }

  const ForwardRun& run_;
  const Problem& problem_;
  ForwardBuffers& b_;
  const std::int64_t dv_;
  Sequence sequence_;
  std::int64_t head_ = 0;
  std::int64_t split_ = 0;
  std::int64_t strip_count_ = 0;
  std::int64_t more_rows_ = 0;
};

}  // namespace

std::size_t forward_workspace(const detail::PlanState& state) {
  const Tiling tiling = tiling_of(state);
  Arena arena;
  PartialResults::place(arena, state.problem, tiling.splits);
  const bool dots = uses_dots(state.problem, kernels_for(state.target.isa));
  return arena.used() +
         forward_thread_bytes(state.problem, tiling, dots) * static_cast<std::size_t>(state.target.threads);
}

void run_forward(const detail::PlanState& state, const Bindings& bindings, std::byte* workspace) {
  ForwardRun run(state, bindings);
  const Tiling& t = run.tiling;
  Arena shared(workspace);
  run.partials = PartialResults::place(shared, state.problem, t.splits);
  const std::size_t bytes = forward_thread_bytes(state.problem, t, run.dots);
  const std::int64_t units = t.row_units * state.problem.batch * t.head_tiles * t.splits;
  detail::WorkQueue queue(units);
  detail::parallel(state.target.threads, [&](int thread) {
    Arena arena(workspace + shared.used() + bytes * static_cast<std::size_t>(thread));
    ForwardBuffers buffers = ForwardBuffers::place(arena, state.problem, t, run.dots);
    ForwardUnit unit(run, buffers);
    if (run.dots) run.kernels.dots->begin();
    // Later rows see more keys under a causal mask: longest first.
    queue.drain([&](std::int64_t index) {
      std::int64_t rest = index;
      const std::int64_t split = rest % t.splits;
      rest /= t.splits;
      const std::int64_t head_tile = rest % t.head_tiles;
      rest /= t.head_tiles;
      const std::int64_t batch = rest % state.problem.batch;
      unit.compute(batch, head_tile, t.row_units - 1 - rest / state.problem.batch, split);
    });
    if (run.dots) run.kernels.dots->end();
  });
  if (t.splits > 1) merge_partials(run.partials, state, bindings, run.kernels);
}

}  // namespace tessera::cpu
