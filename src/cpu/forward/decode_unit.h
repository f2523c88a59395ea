// SPDX-License-Identifier: Apache-2.0
// Forward of sequences with few queries, as in decoding, where reading K and V takes most of the time. Their rows are
// read in place, and several heads of a sequence walk the keys together, so that memory is read nearly in order:
// neighbouring rows of one head are often as far apart as all heads are wide. The sums equal ForwardUnit's bit for bit.
#pragma once

#include <cstdint>

#include "cpu/forward/run.h"
#include "cpu/tiles/visible_keys.h"

namespace tessera::cpu {

/// A key's row for the unit's first head, and the bytes from there to the row of the next head.
struct KeyRow {
  const std::byte* row;
  std::ptrdiff_t head;
};

/// A thread's buffers. Each head tile has 4 or 8 columns; the last ones may be unused.
struct DecodeBuffers {
  std::int64_t columns = 0;
  float* q;                 // (columns, d), scaled
  std::uint16_t* q_bf16;    // (columns, d), not scaled: instead of q, for dot products
  float* o;                 // (columns, dv), not yet divided by the sum
  float* step_o;            // (columns, dv): P·V of one step, which is then added to o; not for dot products
  float* s;                 // (panels, rows_s, kPanel): scores, then probabilities
  std::uint32_t* p;         // (panels, rows_s / 2, kPanel): probabilities as pairs of keys, for dot products
  std::int64_t rows_s;      // tile_kv, rounded up to a multiple of kDecodeKeys
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
  std::byte* zeros;         // a row of zeros
  KeyRow* next;             // (kDecodeKeys): rows of K that are probably read next
  const std::byte** rows;   // (kDecodeKeys): rows of one head
  const std::byte** ahead;  // (tiles · kDecodeKeys): rows to prefetch
  KeyTile keys;             // without k and v

  static DecodeBuffers place(Arena& arena, const Problem& problem, const Tiling& tiling, bool dots);
};

std::size_t decode_thread_bytes(const Problem& problem, const Tiling& tiling, bool dots);

/// One thread's work on units: the queries of some head tiles of a sequence against one part of the keys.
class DecodeUnit {
 public:
  DecodeUnit(const ForwardRun& run, DecodeBuffers& buffers)
      : run_(run), problem_(run.problem), b_(buffers), together_(run.dots ? run.kernels.dots->keys_together : 1) {}

  /// Whether this class may compute the sequence: each of its strips must have few queries.
  static bool takes(const ForwardRun& run, const Sequence& sequence);

  /// Computes `tiles` head tiles from first_tile on. Rows past the used ones are written as empty.
  void compute(const Sequence& sequence, const StripRows& rows, std::int64_t first_tile, std::int64_t tiles,
               std::int64_t split);

 private:
  void load_queries();
  void walk_keys();
  // One softmax step on the tile's spans [first, last), which have no gaps between them.
  void step(std::int64_t first, std::int64_t last);
  // Finds the rows of the step's keys, and those that are probably read next.
  void find_rows(std::int64_t first, std::int64_t last);
  // Computes S = K·Qᵀ. Returns the factor that the exponential still has to apply.
  float score();
  // Masks keys that some columns do not see. Returns whether there may be any.
  bool mask_window(std::int64_t first, std::int64_t last);
  void softmax(float scale);
  // O += Vᵀ·P over rows [first, end) of the step; with fp32 products the sums go to step_o instead.
  void add_values(std::int64_t first, std::int64_t end);
  // The same if a mask may have set weights to 0: values with weight 0 are left out, because they may not be finite.
  void add_masked_values();
  void add_masked_value(std::int64_t row, std::int64_t tile);
  void multiply_values(std::int64_t keys, const std::byte* const* rows, std::int64_t queries, std::int64_t column,
                       std::int64_t row, const RowsAhead& ahead) const;
  void finish();

  // Calls task(head tile, first, keys, rows ahead) for `count` rows, kDecodeKeys at a time, for each head tile in turn.
  // Behind them the `next` rows are prefetched.
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
  const std::int64_t together_;  // keys whose values are added together
  Sequence sequence_;
  QueryTile tile_;  // of the first head tile
  std::int64_t first_row_ = 0;
  std::int64_t row_count_ = 0;
  std::int64_t tiles_ = 0;
  std::int64_t split_ = 0;
  std::int64_t queries_ = 0;  // of a head tile
  std::int64_t stride_ = 0;   // its columns
  std::int64_t cleared_ = 0;  // columns() when S was cleared; −tiles_ with one query in a head tile
  Visible seen_by_all_{};     // key positions
  // Rows of a step: [lead_, lead_ + keys_) are keys. Dot products take groups of together_ keys, aligned as in the key
  // tile. Rows of zeros complete the first and the last group.
  std::int64_t place_ = 0;  // of the first row within its key tile
  std::int64_t lead_ = 0;
  std::int64_t keys_ = 0;
  std::int64_t rows_ = 0;
  std::int64_t next_ = 0;  // rows of b_.next
};

}  // namespace tessera::cpu
