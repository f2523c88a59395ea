// SPDX-License-Identifier: Apache-2.0
// Backward: one pass over tiles of keys, each against all query tiles of all heads of the group. dK and dV of the tile
// stay in cache. Each unit sums its own dQ in fp32, and parts are added in order, so that every sum has one fixed
// order. Scores have queries as rows and keys as columns; K and V are transposed into panels once per tile.
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

/// One thread's work on units. A unit is a part of the keys of a (batch, kv head).
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
  // Removes rows at the start that see none of the keys, and keys at the end that no row sees. Returns false if nothing
  // is left.
  bool trim_to_window(std::int64_t& begin, std::int64_t end, std::int64_t& keys) const;
  void query_tile(std::int64_t h, std::int64_t block, std::int64_t begin, std::int64_t end);

  // load_store.cpp: loads operands, stores gradients.

  // Loads keys [begin, begin + count) of the sequence, as rows and transposed; cuts them into spans at list blocks.
  void load_keys(std::int64_t begin, std::int64_t count);
  void load_queries(std::int64_t head, std::int64_t begin, std::int64_t rows);
  void store_keys();
  // Rows of dK and dV. Callers must ask for them in order, for dK first.
  float* dk_row(std::int64_t row);
  [[nodiscard]] float* dv_row(std::int64_t row) const;
  // Sets the gradients of keys past the used length to 0.
  void clear_unused_keys();

  // step.cpp, and backward.cpp for trim_to_mask(): a tile of queries against a tile of keys.

  // Whether only masks and a positive scale come between Q·Kᵀ and the exponential, and there is no dropout or sink.
  [[nodiscard]] bool scores_are_plain() const;
  void scores(std::int64_t rows, std::int64_t keys);
  // Removes keys at the end that the mask hides from all rows. Returns false if it hides all keys.
  bool trim_to_mask(std::int64_t head, std::int64_t begin, std::int64_t end, std::int64_t& keys) const;
  // Turns the scores in p into probabilities; sets slope to d score' / d score. Returns whether any score was masked.
  bool scores_to_probabilities(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows,
                               std::int64_t keys);
  bool hide(std::int64_t head, std::int64_t block, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  bool hide_empty_rows(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  // Hides blocks that are not listed, and elements that the mask callable hides.
  bool hide_spans(std::int64_t head, std::int64_t block, std::int64_t rows);
  bool hide_outside_window(std::int64_t rows, std::int64_t keys);
  // Computes ds = P∘(dP − delta) times the slopes. Then multiplies P by the dropout factors, for dV.
  void gradient_of_scores(std::int64_t head, std::int64_t begin, std::int64_t rows, std::int64_t keys);
  void weigh_rows(float* a, std::int64_t rows, std::int64_t columns, const float* weight) const;
  void drop_gradients(std::int64_t rows, std::int64_t columns) const;
  // a ∘= b where a is not 0: the factor of a masked element may be NaN or infinite.
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
