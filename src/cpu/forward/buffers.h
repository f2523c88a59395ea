// SPDX-License-Identifier: Apache-2.0
// The layout of the forward's workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/forward/mass.h"
#include "cpu/tiles/arena.h"
#include "cpu/tiles/key_tile.h"
#include "cpu/tiles/tiling.h"
#include "cpu/tiles/visible_keys.h"
#include "plan/implementations.h"

namespace tessera::cpu {

/// A run of query rows that use the same keys, and its columns.
struct Strip {
  std::int64_t first_row;
  std::int64_t rows;
  std::int64_t first_column;
  std::int64_t columns;  // rows · heads of the tile
  QueryTile queries;
  MassGatherer* mass;     // gathers the masses of the strip's block
  std::int64_t next = 0;  // the next key tile that it uses
};

/// A thread's buffers. `columns` counts the queries of all strips that walk the keys together; each strip has whole
/// panels.
struct ForwardBuffers {
  std::int64_t columns = 0;
  Strip* strips;
  float* q;                // (panels, d, kPanel), scaled
  std::uint32_t* q_pairs;  // (panels, padded_dots(d) / 2, kPanel), not scaled: instead of q, for dot products
  float* o;                // (panels, padded dv, kPanel), not yet divided by the sum
  float* s;                // (tile_kv, kPanel): scores, then probabilities; for dot products with kDotTile more rows
  std::uint32_t* p;        // (padded_dots(tile_kv) / 2, kPanel): probabilities as pairs of keys, for dot products
  float* keep;             // as s: dropout factors
  float* staging;          // (kPanel, padded max(d, dv)): rows that are being loaded or stored
  float* maximum;          // (columns)
  float* sum;              // (columns)
  float* correction;       // (columns)
  float* lse;              // (columns)
  std::int64_t* position;  // (columns)
  Visible* visible;        // (columns)
  std::int32_t* head;      // (columns)
  std::int32_t* low;       // (kPanel)
  std::int32_t* high;      // (kPanel)
  KeyTile keys;
  MassGatherer* mass;  // (strips): of the blocks that walk the keys together

  static ForwardBuffers place(Arena& arena, const Problem& problem, const Tiling& tiling, bool dots);
};

std::size_t forward_thread_bytes(const Problem& problem, const Tiling& tiling, bool dots);

}  // namespace tessera::cpu
