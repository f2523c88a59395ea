// SPDX-License-Identifier: Apache-2.0
// What all units of a forward share, and the end of every row.
#pragma once

#include <cstdint>
#include <limits>

#include "base/parallel.h"
#include "cpu/forward/merge.h"
#include "cpu/tiles/key_tile.h"
#include "cpu/tiles/tiling.h"
#include "cpu/tiles/visible_keys.h"

namespace tessera::cpu {

inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// Everything that all units of one run share.
struct ForwardRun {
  const Problem& problem;
  const Bindings& bindings;
  const Kernels& kernels;
  detail::Workers& workers;
  const bool dots;
  const bool reads_in_place;
  Tiling tiling;
  ScoreStage scores;
  TileListReader list;
  KeyTiles key_tiles;
  PartialResults partials;  // splits > 1

  ForwardRun(const detail::PlanState& state, const Bindings& bound, detail::Workers& run_workers)
      : problem(state.problem),
        bindings(bound),
        kernels(kernels_for(state.target.isa)),
        workers(run_workers),
        dots(uses_dots(state.problem, kernels)),
        reads_in_place(cpu::reads_in_place(state)),
        tiling(tiling_of(state)),
        scores(state.problem, bound, kernels),
        list(state.problem, bound, false),
        key_tiles(problem, scores, list, tiling.tile_kv) {}
};

/// Query rows of a strip.
struct StripRows {
  std::int64_t block;  // of the list
  std::int64_t begin;
  std::int64_t used;  // end of the rows that the sequence uses
  std::int64_t end;
};
StripRows rows_of_strip(const Tiling& tiling, const Sequence& sequence, std::int64_t index);

/// Writes the rows of a sequence's O and LSE.
class ResultRows {
 public:
  ResultRows(const ForwardRun& run, const Sequence& sequence);
  /// Prefetches the cache lines of a row of O.
  void ask(std::int64_t head, std::int64_t row) const;
  /// Divides a row (padded dv) by its sum (with the sink) and writes it, to the partial results if there are splits.
  /// Returns its LSE.
  float write(std::int64_t split, std::int64_t head, std::int64_t row, float maximum, float sum, float* result) const;

 private:
  const ForwardRun& run_;
  const std::int64_t first_;  // the sequence's first row in the partial results
  const OutputRows o_;
  const ScalarView lse_;
};

/// Sets s (count × columns, in rows of kPanel) to −inf where a column does not see the key; `first` is the first key's
/// position. low and high (columns) are scratch.
void mask_rows(const Kernels& kernels, const Visible* visible, std::int64_t columns, std::int64_t first,
               std::int64_t count, float* s, std::int32_t* low, std::int32_t* high);

}  // namespace tessera::cpu
