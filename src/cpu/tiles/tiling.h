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
  std::int64_t tiles_a_unit;  // head tiles that walk the keys together; 1 unless all_decode
  std::int64_t head_units;
  bool all_decode;             // every strip has few queries and reads keys in place (decode_unit.h)
  std::int64_t rows;           // query rows of a strip, per head
  std::int64_t block_rows;     // rows of a list's block, or `rows` without lists
  std::int64_t block_strips;   // strips per block
  std::int64_t strip_columns;  // queries of a strip with all its heads, padded to whole panels
  std::int64_t strips;         // strips that walk the keys together
  std::int64_t unit_strips;    // strips of a unit: `strips`, but with masses at least a whole block, one by one
  std::int64_t row_units;      // units that cover the rows of the longest sequence
  std::int64_t splits;
  std::int64_t tile_kv;
  std::int64_t key_tiles;  // of the longest sequence
  std::int64_t key_tiles_a_split;
};

Tiling tiling_of(const detail::PlanState& state);

/// Whether sequences of few queries may read keys in place: there are no mask callable, dropout or masses, and rows
/// need neither dequantising nor padding.
bool reads_in_place(const detail::PlanState& state);

/// Whether masses of tiles are gathered: as outputs, for a next list or for a skip state.
inline bool gathers_mass(const Problem& problem) {
  return problem.mass != MassKind::none || problem.next != TileList::Form::none || problem.skip;
}

/// The query rows of all sequences, unused ones included: the rows per head of an LSE-shaped workspace.
std::int64_t total_rows(const Problem& problem);
/// The most queries, or keys of all sources, that a sequence can have: the longest length, but no more than a packed
/// tensor has tokens.
std::int64_t most_queries(const Problem& problem);
std::int64_t most_keys(const Problem& problem);

std::size_t forward_workspace(const detail::PlanState& state);
void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

std::size_t backward_workspace(const detail::PlanState& state);
void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cpu
