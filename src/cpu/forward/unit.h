// SPDX-License-Identifier: Apache-2.0
// Forward: blocked online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). S is computed transposed, with keys
// as rows and queries as columns, so that maxima, sums and rescaling are vertical vector operations. Neither K nor V
// has to be packed: their elements are broadcast against panels of 64 queries.
#pragma once

#include <cstdint>

#include "cpu/forward/buffers.h"
#include "cpu/forward/run.h"

namespace tessera::cpu {

/// One thread's work on units: strips of queries of a (batch, head tile) against one part of the keys.
class ForwardUnit {
 public:
  ForwardUnit(const ForwardRun& run, ForwardBuffers& buffers)
      : run_(run), problem_(run.problem), b_(buffers), dv_(padded(problem_.head_dim_v)) {}

  void compute(const Sequence& sequence, std::int64_t head_tile, std::int64_t row_unit, std::int64_t split);

 private:
  // A run of the tile's rows.
  struct Rows {
    std::int64_t first;
    std::int64_t end;
  };

  // forward.cpp: the walk over keys.

  // Adds strip `index` of the sequence, if it has rows. Rows past the used length are written as empty. `first_block`:
  // the first block of the unit.
  void add_strip(std::int64_t index, std::int64_t first_block);
  // The strip that has this column.
  [[nodiscard]] const Strip& strip_of(std::int64_t column) const {
    return b_.strips[column / run_.tiling.strip_columns];
  }
  void walk_keys();
  // Computes a strip against the spans collected for it. Spans without a gap between them are one softmax step.
  void key_tile(const Strip& strip);
  void key_run(const Strip& strip, Rows run);
  void panel_run(std::int64_t first, std::int64_t live, Rows run);
  // Returns the first keys of the run that the mask may show to some of the columns; empty if there are none.
  [[nodiscard]] Rows rows_shown(std::int64_t first_column, std::int64_t live, Rows run) const;
  // Classifies the mask for the columns and for keys of one span from a row on; sets `end` to the end of these keys.
  [[nodiscard]] TileClass part_class(std::int64_t first_column, std::int64_t live, const Span& span, std::int64_t row,
                                     std::int64_t& end) const;
  // Whether every one of the columns sees every key of the run.
  [[nodiscard]] bool sees_all(std::int64_t first_column, std::int64_t live, Rows run) const;
  // Returns the run without the keys at either end that no column sees.
  [[nodiscard]] Rows rows_seen(std::int64_t first_column, std::int64_t live, Rows rows) const;

  // load_store.cpp, and skip.cpp for finish_skip(): loads queries, stores results.

  // Transposes Q into panels; sets the position and the limits of every column.
  void load_queries(const Strip& strip);
  void load_panel(const Strip& strip, std::int64_t first);
  // Divides by the sum (and the sink), transposes back and writes O and LSE.
  void finish(const Strip& strip);
  void finish_mass(const Strip& strip);
  void finish_skip(const Strip& strip);
  void write_padding(std::int64_t begin, std::int64_t end) const;

  // step.cpp: a step of the softmax.

  // Computes queries [first_column, first_column + live) of one panel against a run of the tile's keys.
  void panel_step(std::int64_t first_column, std::int64_t live, Rows run, bool window);
  // S (keys, queries) = K·Qᵀ.
  void scores(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end) const;
  void mask_window(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end);
  // Calls the mask callable for spans that need it. Returns whether there were any.
  bool mask_callable(ScoreTile tile, std::int64_t first, std::int64_t end) const;
  // Does the softmax step and stores P as pairs of keys in whole chunks; keys outside the run get weight 0.
  void probabilities_as_pairs(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns,
                              std::int64_t first, std::int64_t end, float scale);
  // The rule threshold reads the scores, because probabilities far below the maximum are 0.
  void look_at_scores(const ScoreTile& tile, std::int64_t first_column, std::int64_t first, std::int64_t end);
  // Gathers masses from the probabilities in fp32, then applies dropout to these.
  void look_at_probabilities(const ScoreTile& tile, std::int64_t first_column, std::int64_t columns, std::int64_t first,
                             std::int64_t end);
  void drop(const ScoreTile& tile, std::int64_t columns) const;
  // O (dv, queries) = O·correction + Vᵀ·P.
  void add_values(std::int64_t first_column, std::int64_t columns, std::int64_t first, std::int64_t end, bool masked);

  const ForwardRun& run_;
  const Problem& problem_;
  ForwardBuffers& b_;
  const std::int64_t dv_;
  Sequence sequence_;
  std::int64_t head_ = 0;
  std::int64_t split_ = 0;
  std::int64_t strip_count_ = 0;
};

}  // namespace tessera::cpu
