// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward/buffers.h"

#include <algorithm>

namespace tessera::cpu {

ForwardBuffers ForwardBuffers::place(Arena& arena, const Problem& problem, const Tiling& tiling, bool dots) {
  ForwardBuffers b{};
  const std::int64_t width = padded(std::max(problem.head_dim_qk, problem.head_dim_v));
  b.columns = tiling.strips * tiling.strip_columns;
  b.strips = arena.take<Strip>(tiling.strips);
  if (dots) {
    b.q_pairs = arena.take<std::uint32_t>(b.columns * padded_dots(problem.head_dim_qk) / 2);
    b.p = arena.take<std::uint32_t>(padded_dots(tiling.tile_kv) / 2 * kPanel);
  } else {
    b.q = arena.take<float>(b.columns * padded(problem.head_dim_qk));
  }
  b.o = arena.take<float>(b.columns * padded(problem.head_dim_v));
  b.s = arena.take<float>((tiling.tile_kv + (dots ? kDotTile : 0)) * kPanel);
  if (problem.dropout > 0.0F) b.keep = arena.take<float>(tiling.tile_kv * kPanel);
  b.staging = arena.take<float>(kPanel * width);
  b.maximum = arena.take<float>(b.columns);
  b.sum = arena.take<float>(b.columns);
  b.correction = arena.take<float>(b.columns);
  b.lse = arena.take<float>(b.columns);
  b.position = arena.take<std::int64_t>(b.columns);
  b.visible = arena.take<Visible>(b.columns);
  b.head = arena.take<std::int32_t>(b.columns);
  b.low = arena.take<std::int32_t>(kPanel);
  b.high = arena.take<std::int32_t>(kPanel);
  b.keys = KeyTile::place(arena, tiling.tile_kv, problem, dots);
  if (!gathers_mass(problem)) return b;
  b.mass = arena.take<MassGatherer>(tiling.strips);
  for (std::int64_t i = 0; i < tiling.strips; ++i) {
    const MassGatherer placed = MassGatherer::place(arena, problem, tiling.strip_columns);
    if (b.mass != nullptr) b.mass[i] = placed;  // null if only bytes are counted
  }
  return b;
}

std::size_t forward_thread_bytes(const Problem& problem, const Tiling& tiling, bool dots) {
  Arena arena;
  ForwardBuffers::place(arena, problem, tiling, dots);
  return arena.used();
}

}  // namespace tessera::cpu
