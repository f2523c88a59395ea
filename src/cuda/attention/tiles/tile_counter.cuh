// SPDX-License-Identifier: Apache-2.0
// Row tiles for blocks that take one after another: the first is that of the block's number, the others are drawn, so
// that who has finished a short one takes the next. The counters lie in the plan's workspace, whose content is anything
// at first; to clear them would be a launch of its own. So the upper 40 bits of each tell whether it counts already:
// they are the plan's tag then. (The bits of a workspace that was never used are taken for a count with a probability
// of 2^-40.) A second counter tells which block is the last to draw: that one clears both for the next run. It counts
// blocks and not row tiles, because blocks may differ about how many of these there are, if someone writes the lengths
// of sequences meanwhile.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

inline constexpr int kCounterBits = 24;

/// Counts one more: 0 for the first of a run, then 1, and so on.
__device__ __forceinline__ int count_on(u64* counter, u64 tag) {
  constexpr u64 numbers = (u64{1} << kCounterBits) - 1;
  u64 before = atomicAdd(counter, u64{1});
  if (before >> kCounterBits == tag) return static_cast<int>(before & numbers);
  before += 1;
  while (true) {
    const u64 found = atomicCAS(counter, before, tag << kCounterBits | 1);
    if (found == before) return 0;
    if (found >> kCounterBits == tag) return static_cast<int>(atomicAdd(counter, u64{1}) & numbers);
    before = found;
  }
}

/// The next number from 0 on. By one thread of a block.
__device__ __forceinline__ int next_tile(const TileCounterParams& tile_counter) {
  return count_on(tile_counter.drawn, tile_counter.tag);
}

/// By one thread of every block of the grid, when it draws no more.
__device__ __forceinline__ void finish_counting(const TileCounterParams& tile_counter) {
  if (count_on(tile_counter.left, tile_counter.tag) != static_cast<int>(gridDim.x) - 1) return;
  atomicExch(tile_counter.drawn, tile_counter.tag << kCounterBits);
  atomicExch(tile_counter.left, tile_counter.tag << kCounterBits);
}

}  // namespace tessera::cuda
