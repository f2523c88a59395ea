// SPDX-License-Identifier: Apache-2.0
// Backward: one pass over tiles of keys; for each, all query tiles of all heads of the group. dK and dV of the tile
// stay in cache, dQ is summed in fp32 by the unit that owns the (batch, kv head), so that every sum has one fixed
// order. Scores lie with queries down and keys across; K and V are transposed into panels once a tile.

#include <algorithm>
#include <limits>

#include "core/parallel.h"
#include "cpu/backward_buffers.h"
#include "cpu/backward_dots.h"
#include "cpu/careful.h"
#include "cpu/gradient_rows.h"
#include "cpu/key_tile.h"
#include "cpu/tiling.h"

namespace tessera::cpu {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct BackwardRun {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  BackwardTiling tiling;
  ScoreStage scores;
  TileListReader list;
  GradientRows rows;

  BackwardRun(const detail::PlanState& state, const Bindings& bound)
      : problem(state.problem),
        bindings(bound),
        kernels(kernels_for(state.target.isa)),
        tiling(BackwardTiling::of(state)),
        scores(state.problem, bound),
        list(state.problem, bound, bool{state.problem.bwd_list}) {}
};

class BackwardUnit {
 public:
  BackwardUnit(const BackwardRun& run, BackwardBuffers& buffers, BackwardDots& dots)
      : run_(run),
        problem_(run.problem),
        b_(buffers),
        dots_(dots),
        d_(padded(problem_.head_dim_qk)),
        dv_(padded(problem_.head_dim_v)) {}

  void compute(const Sequence& sequence, std::int64_t kv_head, std::int64_t part, float* dq) {
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
          query_tile(h, block, row, end);
          row = end;
        }
      }
      store_keys();
    }
    if (part == 0) clear_unused_keys();
  }

 private:
  // Keys [begin, begin + count) of the sequence in fp32, as rows and transposed, cut into spans at list blocks.
  void load_keys(std::int64_t begin, std::int64_t count) {
    keys_ = count;
    span_count_ = 0;
    const std::int64_t border = sequence_.segments[0].length;
    for (std::int64_t at = begin; at < begin + count;) {
      const int segment = at < border ? 0 : 1;
      const Segment& source = sequence_.segments[static_cast<std::size_t>(segment)];
      const std::int64_t first = at - (segment == 0 ? 0 : border);
      const std::int64_t block = first / problem_.block_kv;
      std::int64_t end = std::min(source.length, first + begin + count - at);
      if (run_.list.active()) end = std::min(end, (block + 1) * problem_.block_kv);
      b_.spans[span_count_++] = {segment,
                                 first,
                                 end - first,
                                 at - begin,
                                 source.position + first,
                                 block + (segment == 0 ? 0 : problem_.key_blocks_first()),
                                 false};
      at += end - first;
    }
    for (std::int64_t s = 0; s < span_count_; ++s) {
      const Span& span = b_.spans[s];
      const Segment& source = sequence_.segments[static_cast<std::size_t>(span.segment)];
      for (std::int64_t i = 0; i < span.count; ++i) b_.key_position[span.row + i] = span.position + i;
      if (dots_.used()) {
        dots_.load_keys(source, problem_, span.first, span.count, kv_head_, span.row);
        continue;
      }
      cpu::load_keys(run_.kernels, source.k, problem_.k_type, problem_.head_dim_qk, span.first, span.count, kv_head_,
                     b_.k + span.row * d_);
      cpu::load_keys(run_.kernels, source.v, problem_.v_type, problem_.head_dim_v, span.first, span.count, kv_head_,
                     b_.v + span.row * dv_);
    }
    if (dots_.used()) {
      dots_.turn_keys(run_.kernels, count);
      return;
    }
    const std::int64_t columns = (count + kPanel - 1) / kPanel * kPanel;
    std::fill_n(b_.k + count * d_, (columns - count) * d_, 0.0F);
    std::fill_n(b_.v + count * dv_, (columns - count) * dv_, 0.0F);
    for (std::int64_t first = 0; first < columns; first += kPanel) {
      run_.kernels.transpose(kPanel, d_, b_.k + first * d_, d_, b_.k_t + first * d_, kPanel);
      run_.kernels.transpose(kPanel, dv_, b_.v + first * dv_, dv_, b_.v_t + first * dv_, kPanel);
    }
    std::fill_n(b_.dk, count * d_, 0.0F);
    std::fill_n(b_.dv, count * dv_, 0.0F);
    keys_finite_ = run_.kernels.all_finite(count * d_, b_.k) && run_.kernels.all_finite(count * dv_, b_.v);
  }

  // Whether the list has any of the tile's blocks for this query block.
  [[nodiscard]] bool any_listed(std::int64_t head, std::int64_t block) const {
    if (!run_.list.active()) return true;
    for (std::int64_t s = 0; s < span_count_; ++s) {
      if (run_.list.at(sequence_.batch, head, block, b_.spans[s].block) != TileClass::none) return true;
    }
    return false;
  }

  void query_tile(std::int64_t h, std::int64_t block, std::int64_t begin, std::int64_t end) {
    const std::int64_t head = kv_head_ * problem_.group() + h;
    if (!any_listed(head, block)) return;
    std::int64_t keys = keys_;
    if (!trim_to_band(begin, end, keys)) return;
    const std::int64_t rows = end - begin;
    load_queries(head, begin, rows);
    scores(rows, keys);
    float* dq = dq_ + (h * sequence_.q_length + begin) * d_;
    if (dots_.used() && scores_are_plain()) {
      const bool masked = hide(head, block, rows, keys);
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
      products(masked, rows, keys, dq);
    }
  }

  // Whether nothing but masks stands between the products and the exponential, nor between dP and dO.
  [[nodiscard]] bool scores_are_plain() const {
    return b_.slope == nullptr && !run_.scores.per_element() && !run_.scores.has_dropout() && !problem_.sink &&
           problem_.softmax_scale() > 0.0F;
  }

  void scores(std::int64_t rows, std::int64_t keys) {
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

  // Leaves out rows at the front and keys at the end that see nothing of each other; false when nothing is left.
  bool trim_to_band(std::int64_t& begin, std::int64_t end, std::int64_t& keys) const {
    if (!has_band(problem_)) return true;
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

  void load_queries(std::int64_t head, std::int64_t begin, std::int64_t rows) {
    const RowView q = rows_of(problem_, run_.bindings[Slot::q], sequence_);
    const RowView dout = rows_of(problem_, run_.bindings[Slot::dout], sequence_);
    for (std::int64_t i = 0; i < rows; ++i) {
      b_.query_position[i] = sequence_.q_position + begin + i;
      b_.head[i] = static_cast<std::int32_t>(head);
    }
    if (dots_.used()) {
      const std::int64_t index = run_.rows.at(head, sequence_.q_first + begin);
      dots_.load_queries(run_.kernels, problem_, q, dout, begin, rows, head, run_.rows.shift + index,
                         run_.rows.delta + index);
      return;
    }
    run_.kernels.load_rows(problem_.q_type, q.at(begin, head), q.row, rows, problem_.head_dim_qk,
                           problem_.softmax_scale(), b_.q, d_);
    const float* weight = run_.rows.weight + run_.rows.at(head, sequence_.q_first + begin);
    for (std::int64_t i = 0; i < rows; ++i) {
      run_.kernels.load_row(problem_.o_type, dout.at(begin + i, head), problem_.head_dim_v, weight[i],
                            b_.dout + i * dv_, dv_);
    }
  }

  // p: scores to probabilities; slope: the derivative of everything between. True when any score was masked.
  bool scores_to_probabilities(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows,
                               std::int64_t keys) {
    const std::int64_t ld = run_.tiling.stride;
    if (b_.slope) std::fill_n(b_.slope, rows * ld, 1.0F);
    if (problem_.softcap > 0.0F) run_.kernels.softcap(rows * ld, problem_.softcap, b_.p, b_.slope);
    tile_ = {b_.p, ld, 1, rows, keys, b_.query_position, b_.key_position, b_.head, sequence_.batch};
    if (run_.scores.per_element()) run_.scores.apply(tile_, b_.slope);
    const bool masked = hide(head, block, rows, keys);
    run_.kernels.exp_rows(rows, padded(keys), b_.p, ld,
                          run_.rows.shift + run_.rows.at(head, sequence_.q_first + begin));
    return masked;
  }

  bool hide(std::int64_t head, std::int64_t block, std::int64_t rows, std::int64_t keys) {
    tile_ = {b_.p, run_.tiling.stride, 1, rows, keys, b_.query_position, b_.key_position, b_.head, sequence_.batch};
    bool masked = hide_spans(head, block, rows);
    if (has_band(problem_)) masked |= hide_band(rows, keys);
    return masked;
  }

  // Blocks that the list leaves out and elements that the mask callable hides.
  bool hide_spans(std::int64_t head, std::int64_t block, std::int64_t rows) {
    if (!run_.list.active() && !run_.scores.has_mask()) return false;
    bool masked = false;
    for (std::int64_t s = 0; s < span_count_; ++s) {
      const Span& span = b_.spans[s];
      const std::int64_t end = std::min(span.row + span.count, tile_.keys);
      if (span.row >= end) continue;
      TileClass listed =
          run_.list.active() ? run_.list.at(sequence_.batch, head, block, span.block) : TileClass::partial;
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

  bool hide_band(std::int64_t rows, std::int64_t keys) {
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

  // ds = P∘(dP − delta) times the slopes; then P takes the dropout factors, for dV.
  void gradient_of_scores(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys) {
    const std::int64_t ld = run_.tiling.stride;
    const std::int64_t columns = padded(keys);
    const bool drops = run_.scores.has_dropout();
    if (drops) {
      run_.scores.dropout_factors(tile_, b_.keep);
      multiply(rows, keys, b_.ds, b_.keep);
    }
    const std::int64_t index = run_.rows.at(head, sequence_.q_first + begin);
    const float* weight = problem_.sink && dots_.used() ? run_.rows.weight + index : nullptr;  // else dO has them
    if (weight) weigh_rows(b_.ds, rows, columns, weight);
    const float* delta = run_.rows.delta + index;
    run_.kernels.score_gradient(rows, columns, b_.p, b_.ds, ld, delta, 1.0F, b_.ds);
    if (b_.slope) multiply(rows, keys, b_.ds, b_.slope);
    if (drops) multiply(rows, keys, b_.p, b_.keep);
    if (weight) weigh_rows(b_.p, rows, columns, weight);
  }

  void weigh_rows(float* a, std::int64_t rows, std::int64_t columns, const float* weight) const {
    const std::int64_t ld = run_.tiling.stride;
    for (std::int64_t i = 0; i < rows; ++i) run_.kernels.scale_rows(1, columns, a + i * ld, ld, weight[i]);
  }

  // a ∘= b where a is not 0: a factor of a masked element may be anything.
  void multiply(std::int64_t rows, std::int64_t columns, float* a, const float* b) const {
    for (std::int64_t i = 0; i < rows; ++i) {
      float* to = a + i * run_.tiling.stride;
      const float* by = b + i * run_.tiling.stride;
      for (std::int64_t j = 0; j < columns; ++j) to[j] = to[j] == 0.0F ? 0.0F : to[j] * by[j];
    }
  }

  // dV += Pᵀ·dO, dK += dSᵀ·Q, dQ += dS·K.
  void products(bool masked, std::int64_t rows, std::int64_t keys, float* dq) {
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

  void store_keys() {
    const float scale = dots_.used() ? problem_.softmax_scale() : 1.0F;  // else q has it
    for (std::int64_t s = 0; s < span_count_; ++s) {
      const Span& span = b_.spans[s];
      const KvSlots& slots = kv_slots(span.segment);
      const KeyView dk = keys_of(problem_, run_.bindings, run_.bindings[slots.dk], span.segment, sequence_.batch);
      const KeyView dv = keys_of(problem_, run_.bindings, run_.bindings[slots.dv], span.segment, sequence_.batch);
      for (std::int64_t i = 0; i < span.count; ++i) {
        const std::int64_t row = span.row + i;
        store_gradient(problem_, run_.kernels, gradient_type(problem_, problem_.k_type), dk_row(row),
                       problem_.head_dim_qk, scale, dk.at(span.first + i, kv_head_));
        store_gradient(problem_, run_.kernels, gradient_type(problem_, problem_.v_type), dv_row(row),
                       problem_.head_dim_v, 1.0F, dv.at(span.first + i, kv_head_));
      }
    }
  }

  // Rows of dK and dV; asked for in order.
  float* dk_row(std::int64_t row) {
    if (!dots_.used()) return b_.dk + row * d_;
    if (row % kDotTile == 0) {
      dots_.turn_gradients(run_.kernels, row, dots_.gradient_rows, dots_.gradient_rows + kDotTile * dots_.width());
    }
    return dots_.gradient_rows + row % kDotTile * dots_.width();
  }
  [[nodiscard]] float* dv_row(std::int64_t row) const {
    if (!dots_.used()) return b_.dv + row * dv_;
    return dots_.gradient_rows + (kDotTile + row % kDotTile) * dots_.width();
  }

  // Keys of the tensor past the used length: their gradient is 0.
  void clear_unused_keys() {
    if (problem_.accumulate) return;
    float* zeros = dots_.used() ? dots_.gradient_rows : b_.dk;
    std::fill_n(zeros, std::max(d_, dv_), 0.0F);
    for (int segment = 0; segment < (problem_.kv2 ? 2 : 1); ++segment) {
      const Segment& source = sequence_.segments[static_cast<std::size_t>(segment)];
      const KvSlots& slots = kv_slots(segment);
      const KeyView dk = keys_of(problem_, run_.bindings, run_.bindings[slots.dk], segment, sequence_.batch);
      const KeyView dv = keys_of(problem_, run_.bindings, run_.bindings[slots.dv], segment, sequence_.batch);
      for (std::int64_t i = source.length; i < source.capacity; ++i) {
        run_.kernels.store_row(gradient_type(problem_, problem_.k_type), zeros, problem_.head_dim_qk,
                               dk.at(i, kv_head_));
        run_.kernels.store_row(gradient_type(problem_, problem_.v_type), zeros, problem_.head_dim_v,
                               dv.at(i, kv_head_));
      }
    }
  }

  const BackwardRun& run_;
  const Problem& problem_;
  BackwardBuffers& b_;
  BackwardDots& dots_;
  std::int64_t d_;
  std::int64_t dv_;
  Sequence sequence_;
  ScoreTile tile_;
  std::int64_t kv_head_ = 0;
  std::int64_t keys_ = 0;
  std::int64_t span_count_ = 0;
  bool keys_finite_ = true;
  float* dq_ = nullptr;
};

// Adds the parts of dQ in order, scales and writes a kv head's query rows; rows past the used length get 0.
void store_queries(const BackwardRun& run, const Sequence& sequence, std::int64_t kv_head, float* dq,
                   std::int64_t part_stride) {
  const Problem& problem = run.problem;
  const std::int64_t d = padded(problem.head_dim_qk);
  const DType dtype = gradient_type(problem, problem.q_type);
  const RowView target = rows_of(problem, run.bindings[Slot::dq], sequence);
  alignas(64) float zeros[512] = {};
  for (std::int64_t h = 0; h < problem.group(); ++h) {
    const std::int64_t head = kv_head * problem.group() + h;
    for (std::int64_t row = 0; row < sequence.q_length; ++row) {
      float* sum = dq + (h * sequence.q_length + row) * d;
      for (std::int64_t part = 1; part < run.tiling.parts; ++part) {
        for (std::int64_t i = 0; i < problem.head_dim_qk; ++i) sum[i] += sum[part * part_stride + i];
      }
      store_gradient(problem, run.kernels, dtype, sum, problem.head_dim_qk, problem.softmax_scale(),
                     target.at(row, head));
    }
    for (std::int64_t row = sequence.q_length; row < sequence.q_capacity && !problem.accumulate; ++row) {
      run.kernels.store_row(dtype, zeros, problem.head_dim_qk, target.at(row, head));
    }
  }
}

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
  return arena.used() + thread_bytes(state.problem, tiling, uses_dots) * static_cast<std::size_t>(state.target.threads);
}

void run_backward(const detail::PlanState& state, const Bindings& bindings, std::byte* workspace) {
  BackwardRun run(state, bindings);
  const Problem& problem = state.problem;
  const std::int64_t parts = run.tiling.parts;
  Arena shared(workspace);
  run.rows = GradientRows::place(shared, problem);
  float* partial_dq = place_parts(shared, problem, parts);
  find_gradient_rows(state, bindings, run.kernels, run.rows);
  const bool uses_dots = cpu::uses_dots(problem, run.kernels);
  const std::size_t bytes = thread_bytes(problem, run.tiling, uses_dots);
  const std::int64_t units = problem.batch * problem.heads_kv * parts;
  detail::WorkQueue queue(units);
  detail::parallel(state.target.threads, [&](int thread) {
    Arena arena(workspace + shared.used() + bytes * static_cast<std::size_t>(thread));
    BackwardPlace place(arena, problem, run.tiling, uses_dots);
    BackwardUnit unit(run, place.buffers, place.dots);
    if (uses_dots) run.kernels.dots->begin();
    queue.drain([&](std::int64_t index) {
      const std::int64_t head = index / parts;
      const Sequence sequence = find_sequence(problem, bindings, head / problem.heads_kv);
      float* dq = parts == 1 ? place.buffers.dq : partial_dq + index * dq_floats(problem);
      unit.compute(sequence, head % problem.heads_kv, index % parts, dq);
      if (parts == 1) store_queries(run, sequence, head % problem.heads_kv, dq, 0);
    });
    if (uses_dots) run.kernels.dots->end();
  });
  if (parts == 1) return;
  detail::parallel_for(state.target.threads, problem.batch * problem.heads_kv, [&](std::int64_t head) {
    const Sequence sequence = find_sequence(problem, bindings, head / problem.heads_kv);
    store_queries(run, sequence, head % problem.heads_kv, partial_dq + head * parts * dq_floats(problem),
                  dq_floats(problem));
  });
}

}  // namespace tessera::cpu
