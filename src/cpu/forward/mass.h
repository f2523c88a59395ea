// SPDX-License-Identifier: Apache-2.0
// The probability mass of listed tiles, the next list made from it, and a skip state's step (docs/skip-state.md). One
// pass suffices: during the online softmax each row's sum in each key block is kept relative to the current maximum,
// and it is rescaled to the LSE at the end. The rule threshold keeps each row's largest score instead.
#pragma once

#include <cstdint>

#include "cpu/tiles/arena.h"
#include "cpu/tiles/key_tile.h"

namespace tessera::cpu {

class MassGatherer {
 public:
  /// Takes, for each thread, 2 · key blocks · columns floats, and a float and a byte per key block.
  static MassGatherer place(Arena& arena, const Problem& problem, std::int64_t columns);

  void begin_block();
  void begin_tile();
  /// Adds probabilities after a softmax step: rows [first, end) of the tile and columns from first_column on. They are
  /// relative to `maximum`.
  void add(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column, std::int64_t columns,
           const float* p, const float* maximum);
  /// For the rule threshold: adds scores before a softmax step, of the same rows and columns.
  void add_scores(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column,
                  std::int64_t columns, const float* scores);
  /// Rescales the columns of a tile to their LSE (natural log, sink excluded; a column with an infinite LSE has no
  /// mass) and adds them to the block.
  void end_tile(std::int64_t columns, const float* lse);
  /// The same for the rule threshold: compares each column's largest scores in the order of the key blocks, or in
  /// reverse order if `down`.
  void end_tile_by_maxima(std::int64_t columns, const float* lse, bool down);
  /// Marks the block's masses as unknown: move_state() then keeps the tiles that were computed.
  void set_unknown() { unknown_ = true; }
  /// Writes the block's mass and its row of the next list.
  void end_block(const Problem& problem, const Bindings& bindings, std::int64_t batch, std::int64_t head,
                 std::int64_t query_block);
  /// Updates the block's row of a skip state: its list, which `list` still reads, and its memory.
  void move_state(const Problem& problem, const Bindings& bindings, const TileListReader& list, std::int64_t batch,
                  std::int64_t head, std::int64_t query_block);

 private:
  void finish_rows();
  /// use(first element of the block's row, first and end row in the tile).
  template <class Use>
  void for_each_span(const KeyTile& tile, std::int64_t first, std::int64_t end, Use use);

  std::int64_t blocks_ = 0;
  std::int64_t columns_ = 0;
  bool square_ = false;
  bool by_maxima_ = false;  // the rule threshold
  bool unknown_ = false;
  float cap_ = 0.0F;          // of a row's mass
  std::int64_t rows_ = 0;     // valid rows of the block so far
  float* sum_ = nullptr;      // (blocks, columns)
  float* maximum_ = nullptr;  // (blocks, columns); by_maxima_: the largest scores, and no sums
  bool* touched_ = nullptr;   // (blocks): whether the rows of sum_ and maximum_ are in use
  float* mass_ = nullptr;     // (blocks): Σ over rows of the mass, or of its square; by_maxima_: largest rise in log2
};

}  // namespace tessera::cpu
