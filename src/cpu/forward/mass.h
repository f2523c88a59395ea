// SPDX-License-Identifier: Apache-2.0
// What listed tiles weigh: probability mass per tile, the next list made from it, and a skip state's step
// (docs/skip-state.md). Gathered in one pass: while the softmax runs, each row's sum in each key block is kept relative
// to the maximum of that moment and brought to an LSE at the end; for the rule threshold each row's largest score.
#pragma once

#include <cstdint>

#include "cpu/tiles/arena.h"
#include "cpu/tiles/key_tile.h"

namespace tessera::cpu {

class MassGatherer {
 public:
  /// Per thread: 2 · key blocks · columns floats, and a float and a byte per key block.
  static MassGatherer place(Arena& arena, const Problem& problem, std::int64_t columns);

  void begin_block();
  void begin_tile();
  /// After a softmax step: p (rows [first, end) of the tile, columns from first_column) with the maxima it is relative
  /// to.
  void add(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column, std::int64_t columns,
           const float* p, const float* maximum);
  /// Before a softmax step, for the rule threshold: its scores, in the same place.
  void add_scores(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column,
                  std::int64_t columns, const float* scores);
  /// Brings the columns of a tile to their LSE (natural log, sink excluded; a column of an infinite one weighs nothing)
  /// and adds them to the block.
  void end_tile(std::int64_t columns, const float* lse);
  /// The same for the rule threshold: compares each column's largest scores in the order of the key blocks, or
  /// backwards.
  void end_tile_by_maxima(std::int64_t columns, const float* lse, bool down);
  /// A row of the block says nothing about its tiles.
  void set_unknown() { unknown_ = true; }
  /// Writes the block's mass and its row of the next list.
  void end_block(const Problem& problem, const Bindings& bindings, std::int64_t batch, std::int64_t head,
                 std::int64_t query_block);
  /// Moves the block's row of a skip state on: its list, which `list` still reads, and its memory.
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
  bool* touched_ = nullptr;   // (blocks): the rows above hold something
  float* mass_ = nullptr;     // (blocks): Σ over rows of the row's mass, or of its square; by_maxima_: octaves
};

}  // namespace tessera::cpu
