// SPDX-License-Identifier: Apache-2.0
// How a plan of the tiled implementation cuts a problem into units of work.
#pragma once

#include <cstdint>

#include "cpu/implementations.h"

namespace tessera::cpu {

/// A strip is a run of query rows that use the same keys: rows of one block of a list, for one head or a whole group. A
/// unit of work computes several strips of a (batch, head tile) together, for one part of the keys.
struct Tiling {
  std::int64_t heads_a_tile;  // 1, or the whole group when its heads share one K/V tile
  std::int64_t head_tiles;
  std::int64_t tiles_a_unit;  // head tiles that walk the keys together: more than one only where all_decode
  std::int64_t head_units;
  bool all_decode;             // every strip has few queries, which read keys where they lie (decode_unit.h)
  std::int64_t rows;           // query rows of a strip, a head
  std::int64_t block_rows;     // rows of a list's block, or `rows` without lists
  std::int64_t block_strips;   // strips a block
  std::int64_t strip_columns;  // queries of a strip, all its heads, padded to whole panels
  std::int64_t strips;         // strips that walk the keys together
  std::int64_t unit_strips;    // strips of a unit: `strips`, or a whole block's, one after another, for its masses
  std::int64_t row_units;      // units a sequence of capacity length
  std::int64_t splits;
  std::int64_t tile_kv;
  std::int64_t key_tiles;  // of the longest sequence
  std::int64_t key_tiles_a_split;
};

Tiling tiling_of(const detail::PlanState& state);

/// Whether sequences of few queries may read keys where they lie: no weight becomes 0 after the scores, no one else
/// looks at keys or weights, and rows need no padding.
bool reads_in_place(const detail::PlanState& state);

/// Whether tiles are weighed: for masses, a next list or a skip state.
inline bool gathers_mass(const Problem& problem) {
  return problem.mass != MassKind::none || problem.next != TileList::Form::none || problem.skip;
}

/// Query rows of all sequences by capacity: rows of LSE-shaped workspace a head.
std::int64_t total_rows(const Problem& problem);
/// Queries, or keys of all sources, that a sequence can have: no more than a packed tensor has tokens, however generous
/// the longest length.
std::int64_t most_queries(const Problem& problem);
std::int64_t most_keys(const Problem& problem);

std::size_t forward_workspace(const detail::PlanState& state);
void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

std::size_t backward_workspace(const detail::PlanState& state);
void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cpu
