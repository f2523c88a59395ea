// SPDX-License-Identifier: Apache-2.0
// The tile iterator and the tile loader of the forward. Tiles lie on a fixed grid over the logical keys of a sequence
// (segment 1, then segment 2), without the blocks that a list leaves out. Because of the grid, results do not depend on
// how queries are grouped or keys are stored: paged = dense = varlen, bit for bit.
#pragma once

#include <cstdint>

#include "cpu/scores/scores.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/dot_keys.h"
#include "cpu/tiles/sequence.h"
#include "cpu/tiles/tile_list.h"

namespace tessera::cpu {

/// Consecutive keys of one segment in a tile. If blocks matter (for a list or masses), they are of one block.
struct Span {
  int segment;
  std::int64_t first;     // index in the segment
  std::int64_t count;     // keys
  std::int64_t row;       // first row in the tile
  std::int64_t position;  // of the first key
  std::int64_t block;     // key block in the list's numbering
  bool user_mask;         // the mask callable must be called element by element
};

/// Query rows that walk the keys together: one block of rows, one or all heads of a group.
struct QueryTile {
  std::int64_t batch = 0;
  std::int64_t head = 0;            // first query head
  std::int64_t query_block = 0;     // of the list
  std::int64_t first_position = 0;  // of its first and last row
  std::int64_t last_position = 0;
};

/// The keys of one tile of the grid, loaded as far as some queries need them, and the spans that the current queries
/// use.
struct KeyTile {
  std::int64_t index = 0;  // of the grid
  Span* spans = nullptr;   // capacity tile_kv + 1, in order of rows
  std::int64_t span_count = 0;
  std::int64_t* position = nullptr;  // (tile_kv)
  float* k = nullptr;                // (tile_kv, padded d)
  float* v = nullptr;                // (tile_kv, padded dv)
  DotKeys dots;                      // instead of k and v, for dot products
  bool* loaded = nullptr;            // (tile_kv)

  /// The first row of [first, end) that is loaded (`there`) or that is not (otherwise); `end` if there is none.
  [[nodiscard]] std::int64_t next_row(bool there, std::int64_t first, std::int64_t end) const;
  static KeyTile place(Arena& arena, std::int64_t tile_kv, const Problem& problem, bool dots);
};

class KeyTiles {
 public:
  KeyTiles(const Problem& problem, const ScoreStage& scores, const TileListReader& list, std::int64_t tile_kv)
      : problem_(problem),
        scores_(scores),
        list_(list),
        tile_kv_(tile_kv),
        by_block_(list.active() || problem.mass != MassKind::none || problem.next != TileList::Form::none) {}

  /// Starts a tile of the grid: nothing is loaded.
  void begin(std::int64_t index, KeyTile& tile) const;
  /// Finds the spans of the tile that `queries` may see. Returns false if there are none.
  bool collect(const Sequence& sequence, const QueryTile& queries, KeyTile& tile) const;
  /// The first tile from `from` on that may have keys for `queries`, at most `end`.
  [[nodiscard]] std::int64_t skip(const Sequence& sequence, const QueryTile& queries, std::int64_t from,
                                  std::int64_t end) const;
  /// Loads the collected keys that are not loaded yet into contiguous rows, in fp32 or in the layouts of the dot
  /// products. Rows that are pages apart would compete for the same cache sets.
  void load(const Kernels& kernels, const Sequence& sequence, std::int64_t kv_head, KeyTile& tile) const;

 private:
  // Multiplies loaded rows of 8-bit elements by their descales, and adds the mean of K.
  void dequantise(const Kernels& kernels, const Sequence& sequence, const Segment& source, std::int64_t kv_head,
                  std::int64_t first, std::int64_t count, float* k, float* v) const;
  // Adds keys [first, end) of a segment, cut into spans at block borders if blocks matter. `base`: the row that key 0
  // would have.
  void add(const QueryTile& queries, int segment, const Segment& keys, std::int64_t base, std::int64_t first,
           std::int64_t end, KeyTile& tile) const;

  const Problem& problem_;
  const ScoreStage& scores_;
  const TileListReader& list_;
  std::int64_t tile_kv_;
  bool by_block_;
};

}  // namespace tessera::cpu
