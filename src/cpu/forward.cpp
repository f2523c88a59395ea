// SPDX-License-Identifier: Apache-2.0
// The forward's walk: which keys meet which queries, and the units of work that threads take.

#include <algorithm>

#include "core/parallel.h"
#include "cpu/forward_unit.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kBandStrip = 32;  // queries; a divisor of kPanel

}  // namespace

void ForwardUnit::compute(std::int64_t batch, std::int64_t head_tile, std::int64_t row_unit, std::int64_t split) {
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

void ForwardUnit::add_strip(std::int64_t index) {
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

void ForwardUnit::walk_keys() {
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

void ForwardUnit::key_tile(const Strip& strip) {
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

void ForwardUnit::find_rows(std::int64_t first, std::int64_t last, std::int64_t count) {
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

void ForwardUnit::key_run(const Strip& strip, Rows run) {
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

bool ForwardUnit::sees_all(std::int64_t first_column, std::int64_t live, Rows run) const {
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

ForwardUnit::Rows ForwardUnit::rows_seen(std::int64_t first_column, std::int64_t live, Rows rows) const {
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
    const DotProducts products(run.dots ? run.kernels.dots : nullptr);
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
