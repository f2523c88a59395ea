// SPDX-License-Identifier: Apache-2.0
// O += P·V of e4m3 by wgmma (m64nNk32) needs a K-major V, whose keys are adjacent in memory, and four adjacent keys of
// P in a register. But the TMA loads V with adjacent columns, and a thread has two adjacent keys of each tile of
// scores. So V is transposed in shared memory, and its keys are permuted to the order in which P's registers have them:
//
//     S, two tiles of 16 x 8    keys 2t, 2t + 1 and 2t + 8, 2t + 9 of 16, with t = lane % 4
//     A, a register             places 4t … 4t + 3 of 16
//
// Place 4t + 2h + i of 16 is key 8h + 2t + i. A transposed ldmatrix of 8 keys by 16 columns gives a thread columns 2g
// and 2g + 1 of keys 2t and 2t + 1, with g = lane / 4. Of two such registers, whose keys are 8 apart, one byte
// permutation makes places 4t … 4t + 3 of column 2g, and another those of column 2g + 1. stmatrix stores the results as
// they are. Its eight rows are columns 2g for g < 4 and 2g + 1 for g >= 4, or vice versa, so that they lie in different
// banks.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/widen.cuh"

namespace tessera::cuda {

/// Packs probabilities to A operands; each register has four places of 16 keys.
template <int steps>
__device__ __forceinline__ void pack_bytes(u32 (&p)[steps][4], const Accumulator<1, steps * 4>& s) {
#pragma unroll
  for (int k = 0; k < steps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const left = s.tile[0][4 * k + i / 2 * 2] + i % 2 * 2;
      const float* const right = s.tile[0][4 * k + i / 2 * 2 + 1] + i % 2 * 2;
      p[k][i] = ptx::pack_e4m3(left[0], left[1], right[0], right[1]);
    }
  }
}

/// Copies a tile of V (keys, columns) to VtTile (columns, keys). Two warps call this; each takes every other 16
/// columns, 32 keys at a time. `await_room` returns when `to` may be written. Without `replaces`, the next columns are
/// loaded while those before them are permuted and stored. With `replaces`, values that are not finite become zeros,
/// and the result is whether one of the first `end` keys had such a value.
template <class VTile, class VtTile, bool replaces, class AwaitRoom>
__device__ __forceinline__ bool transpose_bytes(u32 from, u32 to, int warp, int lane, int end, AwaitRoom await_room) {
  constexpr int key_blocks = VTile::rows / 32;
  constexpr int column_blocks = VTile::columns / 32;  // of a warp
  constexpr int together = column_blocks % 4 == 0 && !replaces ? 4 : 2;
  constexpr int steps = key_blocks * column_blocks / together;
  static_assert(VTile::rows % 32 == 0 && VtTile::rows == VTile::columns && VtTile::columns >= VTile::rows);
  static_assert(VTile::columns % 32 == 0 && column_blocks % together == 0);
  const bool lower = lane < 16;
  const u32 first = lower ? 0x6420 : 0x7531;
  const u32 second = lower ? 0x7531 : 0x6420;
  const int row = lane % 8;
  const int column = 2 * row + ((row >= 4) != (lane / 8 % 2 == 1) ? 1 : 0);
  const u32 source = from + VTile::at(lane, warp);
  const u32 target = to + VtTile::at(warp * 16 + column, lane / 16);
  const auto load = [&](int step, u32(&pairs)[together][4]) {
    const int block = step * together;
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const u32 keys = VTile::rows_below(block / column_blocks * 32);
      ptx::ldmatrix_x4_transposed(pairs[i], VTile::chunk_pair(source, block % column_blocks + i) + keys);
    }
  };
  const auto store = [&](int step, const u32(&pairs)[together][4]) {
    const int block = step * together;
#pragma unroll
    for (int i = 0; i < together; ++i) {
      const u32(&pair)[4] = pairs[i];
      const u32 places[4] = {__byte_perm(pair[0], pair[1], first), __byte_perm(pair[0], pair[1], second),
                             __byte_perm(pair[2], pair[3], first), __byte_perm(pair[2], pair[3], second)};
      const u32 columns = VtTile::rows_below((block % column_blocks + i) * 32);
      ptx::stmatrix_x4(VtTile::chunk_pair(target, block / column_blocks) + columns, places);
    }
  };
  if constexpr (replaces) {
    bool replaced = false;
    await_room();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      u32 pairs[together][4];
      load(step, pairs);
#pragma unroll
      for (int i = 0; i < together * 4; ++i) {
        u32& pair = pairs[i / 4][i % 4];
        const u32 others = (non_finite_bytes<VTile::type>(pair) >> 7) * 0xFFU;
        const int key = step * together / column_blocks * 32 + i % 4 * 8 + lane % 4 * 2;
        replaced |= ((others & 0xFFFFU) != 0 && key < end) || (others >> 16U != 0 && key + 1 < end);
        pair &= ~others;
      }
      store(step, pairs);
    }
    return replaced;
  } else {
    u32 pairs[2][together][4];
    load(0, pairs[0]);
    await_room();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (step + 1 < steps) load(step + 1, pairs[(step + 1) % 2]);
      store(step, pairs[step % 2]);
    }
    return false;
  }
}

}  // namespace tessera::cuda
