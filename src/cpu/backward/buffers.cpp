// SPDX-License-Identifier: Apache-2.0
#include "cpu/backward/buffers.h"

#include <algorithm>

#include "cpu/backward/gradient_rows.h"
#include "cpu/tiles/tiling.h"

namespace tessera::cpu {

BackwardTiling BackwardTiling::of(const detail::PlanState& state) {
  const Problem& problem = state.problem;
  const bool listed = problem.list || problem.bwd_list;
  BackwardTiling tiling{};
  tiling.rows = state.tile_q;
  tiling.block_rows = listed ? problem.block_q : std::max<std::int64_t>(most_queries(problem), 1);
  tiling.tile_kv = state.tile_kv;
  tiling.stride = (state.tile_kv + kPanel - 1) / kPanel * kPanel;
  tiling.parts = state.splits;
  return tiling;
}

BackwardBuffers BackwardBuffers::place(Arena& arena, const Problem& problem, const BackwardTiling& tiling, bool dots) {
  BackwardBuffers b{};
  const std::int64_t d = padded(problem.head_dim_qk);
  const std::int64_t dv = padded(problem.head_dim_v);
  const std::int64_t columns = tiling.stride;
  const std::int64_t rows = dots ? padded_dots(tiling.rows) : tiling.rows;
  if (!dots) {
    b.k = arena.take<float>(columns * d);
    b.v = arena.take<float>(columns * dv);
    b.k_t = arena.take<float>(columns * d);
    b.v_t = arena.take<float>(columns * dv);
    b.dk = arena.take<float>(columns * d);
    b.dv = arena.take<float>(columns * dv);
    b.q = arena.take<float>(rows * d);
    b.dout = arena.take<float>(rows * dv);
  }
  b.p = arena.take<float>(rows * columns);
  b.ds = arena.take<float>(rows * columns);
  if (problem.softcap > 0.0F || !problem.score.empty()) b.slope = arena.take<float>(tiling.rows * columns);
  if (problem.dropout > 0.0F) b.keep = arena.take<float>(tiling.rows * columns);
  b.query_position = arena.take<std::int64_t>(tiling.rows);
  b.key_position = arena.take<std::int64_t>(columns);
  b.head = arena.take<std::int32_t>(tiling.rows);
  b.spans = arena.take<Span>(tiling.tile_kv + 1);
  if (tiling.parts == 1) {
    b.dq = arena.take<float>(problem.group() * most_queries(problem) + kDotTile, padded(problem.head_dim_qk));
  }
  return b;
}

std::int64_t dq_floats(const Problem& problem, std::int64_t rows) {
  return (problem.group() * rows + kDotTile) * padded(problem.head_dim_qk);
}

float* place_parts(Arena& arena, const Problem& problem, std::int64_t parts) {
  if (parts == 1) return nullptr;
  const std::int64_t rows = problem.group() * total_rows(problem) + problem.batch * kDotTile;
  return arena.take<float>(problem.heads_kv, parts, rows, padded(problem.head_dim_qk));
}

std::int64_t part_offset(const Problem& problem, const Sequence& sequence, std::int64_t kv_head, std::int64_t part,
                         std::int64_t parts) {
  const std::int64_t before = problem.group() * sequence.q_first + sequence.batch * kDotTile;  // rows
  return problem.heads_kv * parts * before * padded(problem.head_dim_qk) +
         (kv_head * parts + part) * dq_floats(problem, sequence.q_capacity);
}

}  // namespace tessera::cpu
