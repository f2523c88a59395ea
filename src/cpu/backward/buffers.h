// SPDX-License-Identifier: Apache-2.0
// How the backward cuts a problem into tiles and units of work, and the layout of its workspace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/tiles/arena.h"
#include "cpu/tiles/key_tile.h"
#include "cpu/tiles/sequence.h"
#include "plan/implementations.h"

namespace tessera::cpu {

struct BackwardTiling {
  std::int64_t rows;        // query rows of a tile, one head
  std::int64_t block_rows;  // rows of a list's block, or the longest sequence
  std::int64_t tile_kv;
  std::int64_t stride;  // of a row of scores: tile_kv rounded up to whole panels
  std::int64_t parts;   // units per (batch, kv head); unit p takes tiles p, p + parts, …

  static BackwardTiling of(const detail::PlanState& state);
};

/// One thread's tiles. Operands in fp32 are absent if BackwardDots holds them in bf16.
struct BackwardBuffers {
  float* k;                      // (tile_kv, padded d)
  float* v;                      // (tile_kv, padded dv)
  float* k_t;                    // (panels, d, kPanel)
  float* v_t;                    // (panels, dv, kPanel)
  float* dk;                     // as k
  float* dv;                     // as v
  float* q;                      // (rows, padded d), scaled
  float* dout;                   // (rows, padded dv), times the weight of GradientRows
  float* p;                      // (rows, stride): scores, then probabilities
  float* ds;                     // (rows, stride)
  float* slope;                  // (rows, stride): d score' / d score, with softcap or a score callable
  float* keep;                   // (rows, stride): dropout factors
  std::int64_t* query_position;  // (rows)
  std::int64_t* key_position;    // (tile_kv)
  std::int32_t* head;            // (rows)
  Span* spans;                   // (tile_kv + 1)
  float* dq;                     // (group, most queries, padded d), only if there is one part

  static BackwardBuffers place(Arena& arena, const Problem& problem, const BackwardTiling& tiling, bool dots);
};

/// The number of floats in dQ of a (sequence, kv head) with `rows` queries. It includes rows behind the last query,
/// because the last tile of a dot product may write them.
std::int64_t dq_floats(const Problem& problem, std::int64_t rows);

/// Places dQ of every (sequence, kv head, part), one after another: each part has its own dQ until all are added. Null
/// for one part.
float* place_parts(Arena& arena, const Problem& problem, std::int64_t parts);
/// The offset of one of them, in floats.
std::int64_t part_offset(const Problem& problem, const Sequence& sequence, std::int64_t kv_head, std::int64_t part,
                         std::int64_t parts);

}  // namespace tessera::cpu
