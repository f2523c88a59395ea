// SPDX-License-Identifier: Apache-2.0
// The loops of the backward: over the units of work that threads take, and over tiles of keys and of queries.

#include <algorithm>
#include <limits>

#include "cpu/backward/unit.h"
#include "cpu/tiles/tiling.h"
#include "cpu/tiles/visible_keys.h"

namespace tessera::cpu {

void BackwardUnit::compute(const Sequence& sequence, std::int64_t kv_head, std::int64_t part, float* dq) {
  sequence_ = sequence;
  kv_head_ = kv_head;
  dq_ = dq;
  std::fill_n(dq, problem_.group() * sequence.q_length * d_, 0.0F);
  const BackwardTiling& t = run_.tiling;
  for (std::int64_t begin = part * t.tile_kv; begin < sequence.keys(); begin += t.parts * t.tile_kv) {
    load_keys(begin, std::min(t.tile_kv, sequence.keys() - begin));
    for (std::int64_t h = 0; h < problem_.group(); ++h) {
      for (std::int64_t row = 0; row < sequence.q_length;) {
        const std::int64_t block = row / t.block_rows;
        const std::int64_t end = std::min({row + t.rows, (block + 1) * t.block_rows, sequence.q_length});
        if (run_.workers.stopped()) return;
        query_tile(h, block, row, end);
        row = end;
      }
    }
    store_keys();
  }
  if (part == 0) clear_unused_keys();
}

bool BackwardUnit::any_listed(std::int64_t head, std::int64_t block) const {
  if (!run_.list.active()) return true;
  for (std::int64_t s = 0; s < span_count_; ++s) {
    if (run_.list.at(sequence_.batch, head, block, b_.spans[s].block) != TileClass::none) return true;
  }
  return false;
}

bool BackwardUnit::trim_to_window(std::int64_t& begin, std::int64_t end, std::int64_t& keys) const {
  if (!has_window(problem_)) return true;
  std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
  std::int64_t highest = std::numeric_limits<std::int64_t>::min();
  for (std::int64_t s = 0; s < span_count_; ++s) {
    lowest = std::min(lowest, b_.spans[s].position);
    highest = std::max(highest, b_.spans[s].position + b_.spans[s].count - 1);
  }
  while (begin < end && visible_keys(problem_, sequence_.q_position + begin).high < lowest) ++begin;
  if (begin == end || visible_keys(problem_, sequence_.q_position + begin).low > highest) return false;
  const std::int64_t high = visible_keys(problem_, sequence_.q_position + end - 1).high;
  while (keys > 0 && b_.key_position[keys - 1] > high) --keys;
  return keys > 0;
}

bool BackwardUnit::trim_to_mask(std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t& keys) const {
  if (!run_.scores.classifies_parts()) return true;
  if (run_.list.active()) return true;  // full tiles of a list waive the mask
  const std::int64_t first = sequence_.q_position + begin;
  for (std::int64_t s = span_count_; s-- > 0;) {
    const Span& span = b_.spans[s];
    while (keys > span.row) {
      const std::int64_t row = std::max(span.row, (keys - 1) / ScoreStage::kPartKeys * ScoreStage::kPartKeys);
      const std::int64_t position = span.position + row - span.row;
      const TileClass part =
          run_.scores.classify(sequence_.batch, head, first, first + end - begin, position, position + keys - row);
      if (part != TileClass::none) return true;
      keys = row;
    }
  }
  return false;
}

void BackwardUnit::query_tile(std::int64_t h, std::int64_t block, std::int64_t begin, std::int64_t end) {
  const std::int64_t head = kv_head_ * problem_.group() + h;
  if (!any_listed(head, block)) return;
  std::int64_t keys = keys_;
  if (!trim_to_window(begin, end, keys) || !trim_to_mask(head, begin, end, keys)) return;
  const std::int64_t rows = end - begin;
  load_queries(head, begin, rows);
  scores(rows, keys);
  float* dq = dq_ + (h * sequence_.q_length + begin) * d_;
  if (dots_.used() && scores_are_plain()) {
    const bool masked = hide(head, block, begin, rows, keys);
    dots_.softmax_gradient(run_.kernels, rows, keys, b_.p, b_.ds, problem_.softmax_scale());
    dots_.products(run_.kernels, rows, keys, masked, dq, d_);
    return;
  }
  const bool masked = scores_to_probabilities(head, block, begin, rows, keys);
  gradient_of_scores(head, begin, rows, keys);
  if (dots_.used()) {
    dots_.round(run_.kernels, rows, keys, b_.p, b_.ds);
    dots_.products(run_.kernels, rows, keys, true, dq, d_);
  } else {
    products(masked || run_.scores.has_dropout(), rows, keys, dq);
  }
}

namespace {

// A thread's buffers.
struct BackwardPlace {
  BackwardDots dots;
  BackwardBuffers buffers;
  BackwardPlace(Arena& arena, const Problem& problem, const BackwardTiling& tiling, bool uses_dots)
      : dots(uses_dots ? BackwardDots::place(arena, problem, tiling) : BackwardDots()),
        buffers(BackwardBuffers::place(arena, problem, tiling, uses_dots)) {}
};

std::size_t thread_bytes(const Problem& problem, const BackwardTiling& tiling, bool uses_dots) {
  Arena arena;
  const BackwardPlace place(arena, problem, tiling, uses_dots);
  return arena.used();
}

}  // namespace

std::size_t backward_workspace(const detail::PlanState& state) {
  const BackwardTiling tiling = BackwardTiling::of(state);
  const bool uses_dots = cpu::uses_dots(state.problem, kernels_for(state.target.isa));
  Arena arena;
  GradientRows::place(arena, state.problem);
  place_parts(arena, state.problem, tiling.parts);
  arena.take<std::byte>(state.target.threads, thread_bytes(state.problem, tiling, uses_dots));
  return arena.used();
}

void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources) {
  BackwardRun run(state, bindings, resources.workers);
  std::byte* workspace = resources.workspace;
  const Problem& problem = state.problem;
  const std::int64_t parts = run.tiling.parts;
  Arena shared(workspace);
  run.rows = GradientRows::place(shared, problem);
  float* partial_dq = place_parts(shared, problem, parts);
  find_gradient_rows(state, bindings, run.workers, run.kernels, run.rows);
  const bool uses_dots = cpu::uses_dots(problem, run.kernels);
  const std::size_t bytes = thread_bytes(problem, run.tiling, uses_dots);
  const std::int64_t units = problem.batch * problem.heads_kv * parts;
  detail::WorkQueue queue(run.workers, units);
  run.workers.parallel([&](int thread) {
    Arena arena(workspace + shared.used() + bytes * static_cast<std::size_t>(thread));
    BackwardPlace place(arena, problem, run.tiling, uses_dots);
    BackwardUnit unit(run, place.buffers, place.dots);
    const DotProducts products(uses_dots ? run.kernels.dots : nullptr);
    queue.drain([&](std::int64_t index) {
      const std::int64_t head = index / parts;
      const Sequence sequence = find_sequence(problem, bindings, head / problem.heads_kv);
      float* dq = parts == 1
                      ? place.buffers.dq
                      : partial_dq + part_offset(problem, sequence, head % problem.heads_kv, index % parts, parts);
      unit.compute(sequence, head % problem.heads_kv, index % parts, dq);
      if (parts == 1) store_queries(run, sequence, head % problem.heads_kv, dq, 0);
    });
  });
  if (parts == 1) return;
  run.workers.parallel_for(problem.batch * problem.heads_kv, [&](std::int64_t head) {
    const Sequence sequence = find_sequence(problem, bindings, head / problem.heads_kv);
    const std::int64_t kv_head = head % problem.heads_kv;
    store_queries(run, sequence, kv_head, partial_dq + part_offset(problem, sequence, kv_head, 0, parts),
                  dq_floats(problem, sequence.q_capacity));
  });
}

}  // namespace tessera::cpu
