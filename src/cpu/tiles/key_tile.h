// SPDX-License-Identifier: Apache-2.0
// The tile iterator and the tile loader of the forward. Tiles lie on a fixed grid over the logical keys of a
// sequence (segment 1, then segment 2), less the blocks that a list leaves out. The grid makes results independent of
// how queries are grouped: paged = dense = varlen, bit for bit.
#pragma once

#include <cstdint>

#include "cpu/scores/scores.h"
#include "cpu/simd/kernels.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/dot_keys.h"
#include "cpu/tiles/sequence.h"
#include "cpu/tiles/tile_list.h"

namespace tessera::cpu {

/// Consecutive keys of one segment in a tile, all of one listed block where there is a list or a mass per block.
struct Span {
  int segment;
  std::int64_t first;     // index in the segment
  std::int64_t count;     // keys
  std::int64_t row;       // first row in the tile: its place in the tile
  std::int64_t position;  // of the first key
  std::int64_t block;     // key block in the list's numbering
  bool user_mask;         // the mask callable has to be asked element by element
};

/// Query rows that walk the keys together: one block of rows, one or all heads of a group.
struct QueryTile {
  std::int64_t batch = 0;
  std::int64_t head = 0;            // first query head
  std::int64_t query_block = 0;     // of the list
  std::int64_t first_position = 0;  // of its first and last row
  std::int64_t last_position = 0;
};

/// The keys of one tile of the grid, brought in as far as some queries need them, and the spans that the present
/// queries use.
struct KeyTile {
  std::int64_t index = 0;  // of the grid
  Span* spans = nullptr;   // capacity tile_kv + 1, in order of rows
  std::int64_t span_count = 0;
  std::int64_t* position = nullptr;  // (tile_kv)
  float* k = nullptr;                // (tile_kv, padded d)
  float* v = nullptr;                // (tile_kv, padded dv)
  DotKeys dots;                      // instead of k and v, for dot products
  bool* loaded = nullptr;            // (tile_kv)

  /// The first row of [first, end) that is there, or is not; else `end`.
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
  /// Finds the spans that `queries` may see of the tile; false when there are none.
  bool collect(const Sequence& sequence, const QueryTile& queries, KeyTile& tile) const;
  /// The first tile from `from` on that may hold anything for `queries`, at most `end`.
  [[nodiscard]] std::int64_t skip(const Sequence& sequence, const QueryTile& queries, std::int64_t from,
                                  std::int64_t end) const;
  /// Brings the collected keys that are not there yet into rows side by side, of fp32 or as dot products want them:
  /// rows that lie pages apart would fight for the same cache sets.
  void load(const Kernels& kernels, const Sequence& sequence, std::int64_t kv_head, KeyTile& tile) const;

 private:
  // Loaded rows of 8 bits become what they stand for.
  void dequantise(const Kernels& kernels, const Sequence& sequence, const Segment& source, std::int64_t kv_head,
                  std::int64_t first, std::int64_t count, float* k, float* v) const;
  // Keys [first, end) of a segment, of which key 0 would be row `base`, cut into spans at block borders where blocks
  // matter.
  void add(const QueryTile& queries, int segment, const Segment& keys, std::int64_t base, std::int64_t first,
           std::int64_t end, KeyTile& tile) const;

  const Problem& problem_;
  const ScoreStage& scores_;
  const TileListReader& list_;
  std::int64_t tile_kv_;
  bool by_block_;
};

}  // namespace tessera::cpu
