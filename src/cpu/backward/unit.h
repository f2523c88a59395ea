// SPDX-License-Identifier: Apache-2.0
// Backward: one pass over tiles of keys; for each, all query tiles of all heads of the group. dK and dV of the tile
// stay in cache, dQ is summed in fp32 by the unit that owns the (batch, kv head), so that every sum has one fixed
// order. Scores lie with queries down and keys across; K and V are transposed into panels once a tile.
#pragma once

#include <cstdint>

#include "base/parallel.h"
#include "cpu/backward/buffers.h"
#include "cpu/backward/dots.h"
#include "cpu/backward/gradient_rows.h"
#include "cpu/tiles/key_tile.h"

namespace tessera::cpu {

/// Everything that all units of one run share.
struct BackwardRun {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  detail::Workers& workers;
  BackwardTiling tiling;
  ScoreStage scores;
  TileListReader list;
  GradientRows rows;

  BackwardRun(const detail::PlanState& state, const Bindings& bound, detail::Workers& run_workers)
      : problem(state.problem),
        bindings(bound),
        kernels(kernels_for(state.target.isa)),
        workers(run_workers),
        tiling(BackwardTiling::of(state)),
        scores(state.problem, bound, kernels),
        list(state.problem, bound, bool{state.problem.bwd_list}) {}
};

/// One thread's work on units: a part of the keys of a (batch, kv head).
class BackwardUnit {
 public:
  BackwardUnit(const BackwardRun& run, BackwardBuffers& buffers, BackwardDots& dots)
      : run_(run),
        problem_(run.problem),
        b_(buffers),
        dots_(dots),
        d_(padded(problem_.head_dim_qk)),
        dv_(padded(problem_.head_dim_v)) {}

  void compute(const Sequence& sequence, std::int64_t kv_head, std::int64_t part, float* dq);

 private:
  // backward.cpp: the walk over tiles.

  // Whether the list has any of the tile's blocks for this query block.
  [[nodiscard]] bool any_listed(std::int64_t head, std::int64_t block) const;
  // Leaves out rows at the front and keys at the end that see nothing of each other; false when nothing is left.
  bool trim_to_window(std::int64_t& begin, std::int64_t end, std::int64_t& keys) const;
  void query_tile(std::int64_t h, std::int64_t block, std::int64_t begin, std::int64_t end);

  // backward_load_store.cpp: operands in, gradients out.

  // Keys [begin, begin + count) of the sequence in fp32, as rows and transposed, cut into spans at list blocks.
  void load_keys(std::int64_t begin, std::int64_t count);
  void load_queries(std::int64_t head, std::int64_t begin, std::int64_t rows);
  void store_keys();
  // Rows of dK and dV; asked for in order.
  float* dk_row(std::int64_t row);
  [[nodiscard]] float* dv_row(std::int64_t row) const;
  // Keys of the tensor past the used length: their gradient is 0.
  void clear_unused_keys();

  // backward_step.cpp: a tile of queries against a tile of keys.

  // Whether nothing but masks stands between the products and the exponential, nor between dP and dO.
  [[nodiscard]] bool scores_are_plain() const;
  void scores(std::int64_t rows, std::int64_t keys);
  // The keys less those at the end that the mask hides from all rows; false where it hides all.
  bool trim_to_mask(std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t& keys) const;
  // p: scores to probabilities; slope: the derivative of everything between. True when any score was masked.
  bool scores_to_probabilities(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows,
                               std::int64_t keys);
  bool hide(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  bool hide_empty_rows(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  // Blocks that the list leaves out and elements that the mask callable hides.
  bool hide_spans(std::int64_t head, std::int64_t block, std::int64_t rows);
  bool hide_outside_window(std::int64_t rows, std::int64_t keys);
  // ds = P∘(dP − delta) times the slopes; then P takes the dropout factors, for dV.
  void gradient_of_scores(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  void weigh_rows(float* a, std::int64_t rows, std::int64_t columns, const float* weight) const;
  void drop_gradients(std::int64_t rows, std::int64_t columns) const;
  // a ∘= b where a is not 0: a factor of a masked element may be anything.
  void multiply(std::int64_t rows, std::int64_t columns, float* a, const float* b) const;
  // dV += Pᵀ·dO, dK += dSᵀ·Q, dQ += dS·K.
  void products(bool masked, std::int64_t rows, std::int64_t keys, float* dq);

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

/// Adds the parts of dQ in order, scales and writes a kv head's query rows; rows past the used length get 0.
void store_queries(const BackwardRun& run, const Sequence& sequence, std::int64_t kv_head, float* dq,
                   std::int64_t part_stride);

}  // namespace tessera::cpu
