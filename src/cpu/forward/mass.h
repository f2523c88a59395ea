// SPDX-License-Identifier: Apache-2.0
// Probability mass per listed tile, and the next list made from it. Gathered in one pass: while the softmax runs, each
// row's sum in each key block is kept relative to the maximum of that moment and brought to the LSE at the end.
#pragma once

#include <cstdint>

#include "cpu/tiles/arena.h"
#include "cpu/tiles/key_tile.h"

namespace tessera::cpu {

class MassGatherer {
 public:
  /// Per thread: 2 · key blocks · columns floats and one per key block.
  static MassGatherer place(Arena& arena, const Problem& problem, std::int64_t columns);

  void begin_block();
  void begin_tile();
  /// After a softmax step: p (rows [first, end) of the tile, columns from first_column) with the maxima it is relative
  /// to.
  void add(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column, std::int64_t columns,
           const float* p, const float* maximum);
  /// Brings the columns of a tile to their LSE (natural log, sink excluded) and adds them to the block.
  void end_tile(std::int64_t columns, const float* lse);
  /// Writes the block's mass and its row of the next list.
  void end_block(const Problem& problem, const Bindings& bindings, std::int64_t batch, std::int64_t head,
                 std::int64_t query_block);

 private:
  std::int64_t blocks_ = 0;
  std::int64_t columns_ = 0;
  bool square_ = false;
  std::int64_t rows_ = 0;     // valid rows of the block so far
  float* sum_ = nullptr;      // (blocks, columns)
  float* maximum_ = nullptr;  // (blocks, columns)
  float* mass_ = nullptr;     // (blocks): Σ over rows of the row's mass, or of its square
};

}  // namespace tessera::cpu
