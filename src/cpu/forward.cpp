// SPDX-License-Identifier: Apache-2.0
// Forward: blocked online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Scores are computed transposed, keys
// down and queries across, so that maxima, sums and rescaling are vertical vector operations and neither K nor V has
// to be packed: their elements are broadcast against panels of 64 queries.

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "cpu/careful.h"
#include "cpu/key_tile.h"
#include "cpu/mass.h"
#include "cpu/merge.h"
#include "cpu/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kBandStrip = 32;  // queries; a divisor of kPanel

// A run of query rows that use the same keys, and where its columns are.
struct Strip {
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t first_column;
  std::int64_t columns;  // rows · heads of the tile
  QueryTile queries;
};

// A thread's buffers. `columns` are the queries of all strips that walk the keys together, whole panels a strip.
struct ForwardBuffers {
  std::int64_t columns;
  Strip* strips;
  float* q;                // (panels, d, kPanel), scaled
  float* o;                // (panels, dv, kPanel), not yet divided by the sum
  float* s;                // (tile_kv, kPanel): scores, then probabilities
  float* keep;             // as s: dropout factors
  float* staging;          // (kPanel, padded max(d, dv)): rows on their way in or out
  float* maximum;          // (columns)
  float* sum;              // (columns)
  float* correction;       // (columns)
  float* lse;              // (columns)
  std::int64_t* position;  // (columns)
  Visible* visible;        // (columns)
  std::int32_t* head;      // (columns)
  std::int32_t* low;       // (kPanel)
  std::int32_t* high;      // (kPanel)
  KeyTile keys;
  MassGatherer mass;

  static ForwardBuffers place(Arena& arena, const Problem& problem, const Tiling& tiling) {
    ForwardBuffers b{};
    const std::int64_t width = padded(std::max(problem.head_dim_qk, problem.head_dim_v));
    b.columns = tiling.strips * tiling.strip_columns;
    b.strips = arena.take<Strip>(tiling.strips);
    b.q = arena.take<float>(b.columns * padded(problem.head_dim_qk));
    b.o = arena.take<float>(b.columns * padded(problem.head_dim_v));
    b.s = arena.take<float>(tiling.tile_kv * kPanel);
    if (problem.dropout > 0.0F) b.keep = arena.take<float>(tiling.tile_kv * kPanel);
    b.staging = arena.take<float>(kPanel * width);
    b.maximum = arena.take<float>(b.columns);
    b.sum = arena.take<float>(b.columns);
    b.correction = arena.take<float>(b.columns);
    b.lse = arena.take<float>(b.columns);
    b.position = arena.take<std::int64_t>(b.columns);
    b.visible = arena.take<Visible>(b.columns);
    b.head = arena.take<std::int32_t>(b.columns);
    b.low = arena.take<std::int32_t>(kPanel);
    b.high = arena.take<std::int32_t>(kPanel);
    b.keys = KeyTile::place(arena, tiling.tile_kv, problem);
    if (gathers_mass(problem)) b.mass = MassGatherer::place(arena, problem, b.columns);
    return b;
  }
};

// Everything that all units of one run share.
struct ForwardRun {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  Tiling tiling;
  ScoreStage scores;
  TileListReader list;
  KeyTiles key_tiles;
  PartialResults partials;  // splits > 1

  ForwardRun(const detail::PlanState& state, const Bindings& bound)
      : problem(state.problem),
        bindings(bound),
        kernels(kernels_for(state.target.isa)),
        tiling(tiling_of(state)),
        scores(state.problem, bound),
        list(state.problem, bound, false),
        key_tiles(problem, scores, list, tiling.tile_kv) {}
};

class ForwardUnit {
 public:
  ForwardUnit(const ForwardRun& run, ForwardBuffers& buffers) : run_(run), problem_(run.problem), b_(buffers) {}

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
    const std::int64_t d = problem_.head_dim_qk;
    const std::int64_t dv = problem_.head_dim_v;
    const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
    for (std::int64_t i = 0; i < run_.tiling.strip_columns; ++i) {
      const std::int64_t c = strip.first_column + i;
      const std::int64_t live = std::min(i, strip.columns - 1);  // columns past the end repeat the last one's limits
      b_.head[c] = static_cast<std::int32_t>(head_ + live / strip.rows);
      b_.position[c] = sequence_.q_position + strip.first_row + live % strip.rows;
      b_.visible[c] = visible_keys(problem_, b_.position[c]);
      b_.maximum[c] = kNothing;
      b_.sum[c] = 0.0F;
    }
    for (std::int64_t first = 0; first < strip.columns; first += kPanel) {
      const std::int64_t live = std::min(kPanel, strip.columns - first);
      for (std::int64_t c = 0; c < live; ++c) {
        const std::int64_t row = strip.first_row + (first + c) % strip.rows;
        run_.kernels.load_row(problem_.q_type, q.at(row, b_.head[strip.first_column + first + c]), d,
                              problem_.softmax_scale(), b_.staging + c * padded(d), padded(d));
      }
      std::fill_n(b_.staging + live * padded(d), (kPanel - live) * padded(d), 0.0F);
      run_.kernels.transpose(kPanel, d, b_.staging, padded(d), b_.q + (strip.first_column + first) * d, kPanel);
    }
    std::fill_n(b_.o + strip.first_column * dv, run_.tiling.strip_columns * dv, 0.0F);
  }

  // A strip against the spans collected for it; spans without a gap between them are one step of the softmax.
  void key_tile(const Strip& strip) {
    run_.key_tiles.load(run_.kernels, sequence_, head_ / problem_.group(), b_.keys);
    const KeyTile& keys = b_.keys;
    for (std::int64_t s = 0; s < keys.span_count;) {
      const std::int64_t first = keys.spans[s].row;
      std::int64_t end = first;
      while (s < keys.span_count && keys.spans[s].row == end) end += keys.spans[s++].count;
      key_run(strip, {first, end});
    }
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
        panel_step(first, live, run.first, run.end, false);
        continue;
      }
      // At the border of the band a narrower strip of queries leaves less of the triangle to be masked.
      for (std::int64_t part = first; part < first + live; part += kBandStrip) {
        const std::int64_t columns = std::min(kBandStrip, first + live - part);
        const Rows rows = rows_seen(part, columns, run);
        if (rows.first < rows.end) panel_step(part, columns, rows.first, rows.end, true);
      }
    }
  }

  // Queries [first_column, first_column + live) of one panel against keys [first, end) of the tile.
  void panel_step(std::int64_t first_column, std::int64_t live, std::int64_t first, std::int64_t end, bool band) {
    const Kernels& kernels = run_.kernels;
    const KeyTile& keys = b_.keys;
    const std::int64_t columns = padded(live);
    const std::int64_t d = problem_.head_dim_qk;
    const std::int64_t dv = problem_.head_dim_v;
    const std::int64_t in_panel = first_column % kPanel;
    const std::int64_t panel = first_column - in_panel;
    bool masked = band;
    float* s = b_.s + first * kPanel;
    kernels.matmul(end - first, columns, d, {keys.k + first * padded(d), padded(d), 1}, b_.q + panel * d + in_panel,
                   kPanel, s, kPanel, false, nullptr);
    if (problem_.softcap > 0.0F) kernels.softcap((end - first) * kPanel, problem_.softcap, s, nullptr);
    ScoreTile tile{s,
                   1,
                   kPanel,
                   live,
                   end - first,
                   b_.position + first_column,
                   keys.position + first,
                   b_.head + first_column,
                   sequence_.batch};
    if (run_.scores.per_element()) run_.scores.apply(tile, nullptr);
    if (band) mask_band(first_column, columns, first, end);
    if (run_.scores.has_mask()) masked |= mask_callable(tile, first, end);
    float* maximum = b_.maximum + first_column;
    float* correction = b_.correction + first_column;
    kernels.softmax_step(end - first, columns, s, maximum, b_.sum + first_column, correction);
    if (gathers_mass(problem_)) b_.mass.add(keys, first, end, first_column, live, b_.s, maximum);
    if (run_.scores.has_dropout()) drop(tile, columns);
    masked |= run_.scores.has_dropout();  // a dropped key weighs 0 too
    const Broadcast v{keys.v + first * padded(dv), 1, padded(dv)};
    float* o = b_.o + panel * dv + in_panel;
    if (masked && !values_finite(first, end)) {
      careful_matmul(kernels, SkipZerosOf::b, dv, columns, end - first, v, s, kPanel, o, kPanel, true, correction);
    } else {
      kernels.matmul(dv, columns, end - first, v, s, kPanel, o, kPanel, true, correction);
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

  [[nodiscard]] bool values_finite(std::int64_t first, std::int64_t end) const {
    const std::int64_t width = padded(problem_.head_dim_v);
    return run_.kernels.all_finite((end - first) * width, b_.keys.v + first * width);
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
      run_.kernels.transpose(dv, kPanel, b_.o + first * dv, kPanel, b_.staging, padded(dv));
      for (std::int64_t c = 0; c < live; ++c) {
        const std::int64_t row = strip.first_row + (first + c - strip.first_column) % strip.rows;
        const std::int64_t head = b_.head[first + c];
        const float maximum = b_.maximum[first + c];
        const float sum = b_.sum[first + c];
        const float value = sum == 0.0F ? kNothing : maximum + std::log(sum);
        b_.lse[first + c] = value;
        float* result = b_.staging + c * padded(dv);
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
  Sequence sequence_;
  std::int64_t head_ = 0;
  std::int64_t split_ = 0;
  std::int64_t strip_count_ = 0;
};

std::size_t thread_bytes(const Problem& problem, const Tiling& tiling) {
  Arena arena;
  ForwardBuffers::place(arena, problem, tiling);
  return arena.used();
}

}  // namespace

std::size_t forward_workspace(const detail::PlanState& state) {
  const Tiling tiling = tiling_of(state);
  Arena arena;
  PartialResults::place(arena, state.problem, tiling.splits);
  return arena.used() + thread_bytes(state.problem, tiling) * static_cast<std::size_t>(state.target.threads);
}

void run_forward(const detail::PlanState& state, const Bindings& bindings, std::byte* workspace) {
  ForwardRun run(state, bindings);
  const Tiling& t = run.tiling;
  Arena shared(workspace);
  run.partials = PartialResults::place(shared, state.problem, t.splits);
  const std::size_t bytes = thread_bytes(state.problem, t);
  const std::int64_t units = t.row_units * state.problem.batch * t.head_tiles * t.splits;
  detail::WorkQueue queue(units);
  detail::parallel(state.target.threads, [&](int thread) {
    Arena arena(workspace + shared.used() + bytes * static_cast<std::size_t>(thread));
    ForwardBuffers buffers = ForwardBuffers::place(arena, state.problem, t);
    ForwardUnit unit(run, buffers);
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
  });
  if (t.splits > 1) merge_partials(run.partials, state, bindings, run.kernels);
}

}  // namespace tessera::cpu
