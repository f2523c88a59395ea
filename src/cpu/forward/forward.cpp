// SPDX-License-Identifier: Apache-2.0
// The loops of the forward: over the units of work that threads take, and over the keys of each unit.

#include <algorithm>

#include "cpu/forward/decode_unit.h"
#include "cpu/forward/unit.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kWindowStrip = 32;  // queries; a divisor of kPanel

// Units of both kinds use the same memory of a thread, one after another.
std::size_t unit_bytes(const detail::PlanState& state, const Tiling& tiling, bool dots) {
  const std::size_t decode = reads_in_place(state) ? decode_thread_bytes(state.problem, tiling, dots) : 0;
  return std::max(tiling.all_decode ? 0 : forward_thread_bytes(state.problem, tiling, dots), decode);
}

}  // namespace

void ForwardUnit::compute(const Sequence& sequence, std::int64_t head_tile, std::int64_t row_unit, std::int64_t split) {
  const Tiling& t = run_.tiling;
  sequence_ = sequence;
  head_ = head_tile * t.heads_a_tile;
  split_ = split;
  const std::int64_t blocks = gathers_mass(problem_) ? t.unit_strips / t.block_strips : 0;
  for (std::int64_t i = 0; i < blocks; ++i) b_.mass[i].begin_block();
  const std::int64_t first = row_unit * t.unit_strips;
  for (std::int64_t strip = first; strip < first + t.unit_strips; strip += t.strips) {
    strip_count_ = 0;
    for (std::int64_t i = strip; i < strip + t.strips; ++i) add_strip(i, first / t.block_strips);
    if (strip_count_ > 0) walk_keys();
  }
  for (std::int64_t i = 0; i < blocks; ++i) {
    const std::int64_t block = first / t.block_strips + i;
    if (block >= problem_.query_blocks()) return;
    if (problem_.skip) {
      b_.mass[i].move_state(problem_, run_.bindings, run_.list, sequence.batch, head_, block);
    } else {
      b_.mass[i].end_block(problem_, run_.bindings, sequence.batch, head_, block);
    }
  }
}

StripRows rows_of_strip(const Tiling& t, const Sequence& sequence, std::int64_t index) {
  const std::int64_t block = index / t.block_strips;
  const std::int64_t begin = block * t.block_rows + index % t.block_strips * t.rows;
  const std::int64_t end = std::min({begin + t.rows, (block + 1) * t.block_rows, sequence.q_capacity});
  return {block, begin, std::min(end, sequence.q_length), end};
}

void ForwardUnit::add_strip(std::int64_t index, std::int64_t first_block) {
  const Tiling& t = run_.tiling;
  const auto [block, begin, used, end] = rows_of_strip(t, sequence_, index);
  if (t.splits == 1) write_padding(std::max(begin, used), end);
  if (begin >= used) return;
  const std::int64_t position = sequence_.q_position + begin;
  b_.strips[strip_count_] = {begin,
                             used - begin,
                             strip_count_ * t.strip_columns,
                             (used - begin) * t.heads_a_tile,
                             {sequence_.batch, head_, block, position, position + used - begin - 1},
                             gathers_mass(problem_) ? b_.mass + (block - first_block) : nullptr};
  load_queries(b_.strips[strip_count_++]);
}

void ForwardUnit::walk_keys() {
  const Tiling& t = run_.tiling;
  const std::int64_t key_tiles = (sequence_.keys() + t.tile_kv - 1) / t.tile_kv;
  const std::int64_t last = std::min(key_tiles, (split_ + 1) * t.key_tiles_a_split);
  for (std::int64_t i = 0; gathers_mass(problem_) && i < strip_count_; ++i) b_.strips[i].mass->begin_tile();
  const auto skip = [&](Strip& strip, std::int64_t from) {
    strip.next = run_.key_tiles.skip(sequence_, strip.queries, from, last);
    return strip.next;
  };
  std::int64_t next = last;
  for (std::int64_t i = 0; i < strip_count_; ++i)
    next = std::min(next, skip(b_.strips[i], split_ * t.key_tiles_a_split));
  while (next < last && !run_.workers.stopped()) {
    const std::int64_t index = next;
    next = last;
    run_.key_tiles.begin(index, b_.keys);
    for (std::int64_t i = 0; i < strip_count_; ++i) {
      Strip& strip = b_.strips[i];
      if (strip.next == index) {
        if (run_.key_tiles.collect(sequence_, strip.queries, b_.keys)) key_tile(strip);
        skip(strip, index + 1);
      }
      next = std::min(next, strip.next);
    }
  }
  for (std::int64_t i = 0; i < strip_count_; ++i) finish(b_.strips[i]);
}

void ForwardUnit::key_tile(const Strip& strip) {
  const KeyTile& keys = b_.keys;
  run_.key_tiles.load(run_.kernels, sequence_, head_ / problem_.group(), b_.keys);
  for (std::int64_t s = 0; s < keys.span_count;) {
    const std::int64_t first = keys.spans[s].row;
    std::int64_t end = first;
    while (s < keys.span_count && keys.spans[s].row == end) end += keys.spans[s++].count;
    key_run(strip, {first, end});
  }
}

void ForwardUnit::key_run(const Strip& strip, Rows run) {
  const std::int64_t last = strip.first_column + strip.columns;
  for (std::int64_t first = strip.first_column; first < last; first += kPanel) {
    const std::int64_t live = std::min(kPanel, last - first);
    if (!run_.scores.classifies_parts()) {
      panel_run(first, live, run);
      continue;
    }
    for (Rows shown = rows_shown(first, live, run); shown.first < shown.end;
         shown = rows_shown(first, live, {shown.end, run.end})) {
      panel_run(first, live, shown);
    }
  }
}

void ForwardUnit::panel_run(std::int64_t first, std::int64_t live, Rows run) {
  if (!has_window(problem_) || sees_all(first, live, run)) return panel_step(first, live, run, false);
  // At the edge of the window narrower strips of queries compute fewer scores that are then masked.
  for (std::int64_t part = first; part < first + live; part += kWindowStrip) {
    const std::int64_t columns = std::min(kWindowStrip, first + live - part);
    const Rows rows = rows_seen(part, columns, run);
    if (rows.first < rows.end) panel_step(part, columns, rows, true);
  }
}

TileClass ForwardUnit::part_class(std::int64_t first_column, std::int64_t live, const Span& span, std::int64_t row,
                                  std::int64_t& end) const {
  end = span.row + span.count;
  if (!span.user_mask) return TileClass::full;
  if (!run_.scores.classifies_parts()) return TileClass::partial;
  end = std::min(end, (row / ScoreStage::kPartKeys + 1) * ScoreStage::kPartKeys);
  const auto [low, high] = std::minmax_element(b_.position + first_column, b_.position + first_column + live);
  const std::int64_t key = span.position + row - span.row;
  return run_.scores.classify(sequence_.batch, *std::min_element(b_.head + first_column, b_.head + first_column + live),
                              *low, *high + 1, key, key + end - row);
}

ForwardUnit::Rows ForwardUnit::rows_shown(std::int64_t first_column, std::int64_t live, Rows run) const {
  Rows shown{run.end, run.end};
  for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
    const Span& span = b_.keys.spans[s];
    for (std::int64_t row = std::max(span.row, run.first), end = row; row < std::min(span.row + span.count, run.end);
         row = end) {
      const bool visible = part_class(first_column, live, span, row, end) != TileClass::none;
      end = std::min(end, run.end);
      if (!visible && shown.first < shown.end) return shown;
      if (visible && shown.first == run.end) shown = {row, end};
      if (visible) shown.end = end;
    }
  }
  return shown;
}

bool ForwardUnit::sees_all(std::int64_t first_column, std::int64_t live, Rows run) const {
  Visible all = b_.visible[first_column];
  for (std::int64_t c = first_column + 1; c < first_column + live; ++c) {
    all = {std::max(all.low, b_.visible[c].low), std::min(all.high, b_.visible[c].high)};
  }
  for (std::int64_t s = 0; s < b_.keys.span_count; ++s) {
    const Span& span = b_.keys.spans[s];
    const std::int64_t first = std::max(span.row, run.first);
    const std::int64_t end = std::min(span.row + span.count, run.end);
    if (first >= end) continue;
    const std::int64_t position = span.position + first - span.row;
    if (position < all.low || position + end - first - 1 > all.high) return false;
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
  arena.take<std::byte>(state.target.threads, unit_bytes(state, tiling, dots));
  return arena.used();
}

void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  ForwardRun run(state, bindings, resources.workers);
  std::byte* workspace = resources.workspace;
  const Tiling& t = run.tiling;
  Arena shared(workspace);
  run.partials = PartialResults::place(shared, state.problem, t.splits);
  const std::size_t bytes = unit_bytes(state, t, run.dots);
  const std::int64_t units = t.row_units * state.problem.batch * t.head_units * t.splits;
  detail::WorkQueue queue(run.workers, units);
  run.workers.parallel([&](int thread) {
    std::byte* own = workspace + shared.used() + bytes * static_cast<std::size_t>(thread);
    Arena many(own), few(own);
    ForwardBuffers buffers{};
    if (!t.all_decode) buffers = ForwardBuffers::place(many, state.problem, t, run.dots);
    ForwardUnit unit(run, buffers);
    DecodeBuffers decode_buffers{};
    if (run.reads_in_place) decode_buffers = DecodeBuffers::place(few, state.problem, t, run.dots);
    DecodeUnit decode(run, decode_buffers);
    const DotProducts products(run.dots ? run.kernels.dots : nullptr);
    // Under a causal mask later rows see more keys, so the last row units come first.
    queue.drain([&](std::int64_t index) {
      std::int64_t rest = index;
      const std::int64_t split = rest % t.splits;
      rest /= t.splits;
      const std::int64_t first_tile = rest % t.head_units * t.tiles_a_unit;
      rest /= t.head_units;
      const Sequence sequence = find_sequence(state.problem, bindings, rest % state.problem.batch);
      const std::int64_t row_unit = t.row_units - 1 - rest / state.problem.batch;
      if (!DecodeUnit::takes(run, sequence)) {
        unit.compute(sequence, first_tile, row_unit, split);
        return;
      }
      const std::int64_t tiles = std::min(t.tiles_a_unit, t.head_tiles - first_tile);
      for (std::int64_t strip = row_unit * t.unit_strips; strip < (row_unit + 1) * t.unit_strips; ++strip) {
        decode.compute(sequence, rows_of_strip(t, sequence, strip), first_tile, tiles, split);
      }
    });
  });
  if (t.splits > 1) merge_partials(run.partials, state, bindings, run.workers, run.kernels);
}

}  // namespace tessera::cpu
