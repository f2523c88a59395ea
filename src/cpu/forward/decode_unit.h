// SPDX-License-Identifier: Apache-2.0
// Forward of sequences of a few queries, as in decoding: what takes time is reading K and V. Their rows are read where
// they lie, and several heads of a sequence walk the keys together, so that memory is read nearly in order: the rows of
// one head alone are often as far apart as all heads are wide. The sums are those of ForwardUnit, to the bit.
#pragma once

#include <cstdint>

#include "cpu/forward/run.h"
#include "cpu/tiles/visible_keys.h"

namespace tessera::cpu {

/// A key's row of the unit's first head, and how far on the next head's is.
struct KeyRow {
  const std::byte* row;
  std::ptrdiff_t head;
};

/// A thread's buffers. A head tile has 4 or 8 columns of them, of which the last ones may be unused.
struct DecodeBuffers {
  std::int64_t columns = 0;
  float* q;                 // (columns, d), scaled
  std::uint16_t* q_bf16;    // (columns, d), not scaled: instead of q, for dot products
  float* o;                 // (columns, dv), not yet divided by the sum
  float* step_o;            // (columns, dv): of a step, which is added to o; not for dot products
  float* s;                 // (panels, rows_s, kPanel): scores, then probabilities
  std::uint32_t* p;         // (panels, rows_s / 2, kPanel): probabilities as pairs of keys, for dot products
  std::int64_t rows_s;      // tile_kv, to a multiple of kDecodeKeys
  float* maximum;           // (columns)
  float* sum;               // (columns)
  float* correction;        // (columns)
  std::int64_t* position;   // (columns)
  Visible* visible;         // (columns)
  std::int32_t* head;       // (columns)
  std::int32_t* low;        // (kPanel)
  std::int32_t* high;       // (kPanel)
  KeyRow* k;                // (rows_s)
  KeyRow* v;                // (rows_s)
  std::byte* zeros;         // a row of them
  KeyRow* next;             // (kDecodeKeys): of K behind the tile
  const std::byte** rows;   // (kDecodeKeys): of one head
  const std::byte** ahead;  // (tiles · kDecodeKeys)
  KeyTile keys;             // without k and v

  static DecodeBuffers place(Arena& arena, const Problem& problem, const Tiling& tiling, bool dots);
};

std::size_t decode_thread_bytes(const Problem& problem, const Tiling& tiling, bool dots);

/// One thread's work on units: the queries of some head tiles of a sequence against one part of the keys.
class DecodeUnit {
 public:
  DecodeUnit(const ForwardRun& run, DecodeBuffers& buffers)
      : run_(run), problem_(run.problem), b_(buffers), together_(run.dots ? run.kernels.dots->keys_together : 1) {}

  /// Whether all strips of the sequence are of few queries that may be computed here.
  static bool takes(const ForwardRun& run, const Sequence& sequence);

  /// `tiles` head tiles from first_tile on; rows past the used ones are written as empty.
  void compute(const Sequence& sequence, const StripRows& rows, std::int64_t first_tile, std::int64_t tiles,
               std::int64_t split);

 private:
  void load_queries();
  void walk_keys();
  // The tile's spans [first, last), without a gap between them: one step of the softmax.
  void step(std::int64_t first, std::int64_t last);
  // Where the keys lie, as rows of the step, and the most likely next ones.
  void find_rows(std::int64_t first, std::int64_t last);
  // S = K·Qᵀ; gives the factor that the exponential still has to apply.
  float score();
  // Masks what not all columns see; true if there was something.
  bool mask_window(std::int64_t first, std::int64_t last);
  void softmax(float scale);
  // O += Vᵀ·P over rows [first, end) of the step, or the step's own sums for fp32 products.
  void add_values(std::int64_t first, std::int64_t end);
  // The same where a weight may be 0 because of a mask: values that are not finite must not reach that sum.
  void add_masked_values();
  void add_masked_value(std::int64_t row, std::int64_t tile);
  void multiply_values(std::int64_t keys, const std::byte* const* rows, std::int64_t queries, std::int64_t column,
                       std::int64_t row, const RowsAhead& ahead) const;
  void finish();

  // task(head tile, first, keys, rows ahead) on the `count` rows, kDecodeKeys at a time, all heads in turn; behind them
  // `next` rows are wanted.
  template <class Task>
  void for_rows(const KeyRow* rows, std::int64_t count, std::int64_t bytes, const KeyRow* next, std::int64_t next_count,
                std::int64_t next_bytes, const Task& task);
  RowsAhead find_ahead(const KeyRow* rows, std::int64_t count, std::int64_t bytes);

  [[nodiscard]] float* scores_at(std::int64_t column, std::int64_t row) const {
    return b_.s + (column / kPanel * b_.rows_s + row) * kPanel + column % kPanel;
  }
  [[nodiscard]] std::uint32_t* pairs_at(std::int64_t column, std::int64_t row) const {
    return b_.p + (column / kPanel * b_.rows_s + row) / 2 * kPanel + column % kPanel;
  }
  [[nodiscard]] std::int64_t columns() const { return tiles_ * stride_; }

  const ForwardRun& run_;
  const Problem& problem_;
  DecodeBuffers& b_;
  const std::int64_t together_;  // keys whose values are added in one go
  Sequence sequence_;
  QueryTile tile_;  // of the first head tile
  std::int64_t first_row_ = 0;
  std::int64_t row_count_ = 0;
  std::int64_t tiles_ = 0;
  std::int64_t split_ = 0;
  std::int64_t queries_ = 0;  // of a head tile
  std::int64_t stride_ = 0;   // its columns
  std::int64_t cleared_ = 0;  // columns of S for which the unused ones are 0; negative: tiles of one query
  Visible seen_by_all_{};     // key positions
  // Rows of a step: [lead_, lead_ + keys_) are keys. Dot products take some together as the grid has them; rows of
  // zeros stand for what the first and the last ones lack.
  std::int64_t place_ = 0;  // of the first row in its tile
  std::int64_t lead_ = 0;
  std::int64_t keys_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t next_ = 0;  // rows of b_.next
};

}  // namespace tessera::cpu
