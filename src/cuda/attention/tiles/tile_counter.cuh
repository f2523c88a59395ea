// SPDX-License-Identifier: Apache-2.0
// Dynamic scheduling of row tiles for persistent blocks. The first tile of a block is that of its index; further tiles
// are drawn from a counter, so that a block that has finished a short one takes the next. The counters lie in the
// plan's workspace, which is not initialised, because clearing it would need another launch. So the upper 40 bits of a
// counter are the plan's tag once it is in use. (A workspace that was never used has these bits by chance with a
// probability of 2^-40.) A second counter shows which block is the last to draw; that one resets both for the next run.
// It counts blocks and not row tiles, because blocks may disagree on the number of row tiles if the lengths of
// sequences are written meanwhile.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

inline constexpr int kCounterBits = 24;

/// Increments a counter and returns its value before: 0 for the first call of a run.
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

/// Draws the next number, from 0 on. One thread of a block calls this.
__device__ __forceinline__ int next_tile(const TileCounterParams& tile_counter) {
  return count_on(tile_counter.drawn, tile_counter.tag);
}

/// One thread of every block of the grid calls this when the block draws no more.
__device__ __forceinline__ void finish_counting(const TileCounterParams& tile_counter) {
  if (count_on(tile_counter.left, tile_counter.tag) != static_cast<int>(gridDim.x) - 1) return;
  atomicExch(tile_counter.drawn, tile_counter.tag << kCounterBits);
  atomicExch(tile_counter.left, tile_counter.tag << kCounterBits);
}

}  // namespace tessera::cuda
