// SPDX-License-Identifier: Apache-2.0
// What a warp's 16 rows say of the tiles of a skip state's list while they walk them (docs/skip-state.md): one number a
// tile, which who owns the row tile brings together with those of the other warps. Each lane has a part of two rows;
// what lanes exchange is shared by four tiles.
#pragma once

#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/tiles/tile_list.cuh"

namespace tessera::cuda {

/// Where the address of the state's parameters is known.
__device__ __forceinline__ const SkipParams& skip_of_params(const AttentionParams& p) {
  return static_cast<const SkipFwdParams&>(static_cast<const FwdParams&>(p)).skip;
}

/// The key block that a tile of such a list is of.
__device__ __forceinline__ int key_block_of(const ListParams& list, const KvTile& tile) {
  return ptx::divide(tile.first, list.block_kv) + (tile.segment == 0 ? 0 : list.second_block);
}

/// By wgmma: where the warps' rows say what they know of row tile `item` of this block, (warp, key block).
template <FwdConfig C>
__device__ __forceinline__ float* partials(const AttentionParams& p, int item) {
  const i64 row_tile = static_cast<i64>(blockIdx.x) * 2 + (item & 1);
  return skip_of_params(p).partials + row_tile * C.warps * p.list.key_blocks;
}

/// Four tiles in turn: lane j of four has tile j of them.
struct FourTiles {
  int walked = 0;  // list tiles that were ended
  int block = -1;  // key block of the tile in work; none before the first
  int mine;        // key block of this lane's tile; none: −1

  /// Whether the tile in work is the last of four. By all lanes.
  __device__ __forceinline__ bool end_tile(int lane) {
    if ((walked & 3) == (lane & 3)) mine = block;
    return (++walked & 3) == 0;
  }
};

/// a of the lanes without, b of those with `step` in their number, summed over the two lanes that differ in it.
__device__ __forceinline__ float add_in_turn(float a, float b, int lane, int step) {
  const bool upper = (lane & step) != 0;
  const float got = __shfl_xor_sync(0xffffffffU, upper ? a : b, step);
  return (upper ? b : a) + got;
}

/// Of configurations without `skip`: nothing.
template <FwdConfig C, Skip rule = C.skip>
struct TileMeasure {
  template <class Store>
  __device__ __forceinline__ void enter(int /*block*/, int /*lane*/, Store /*store*/) {}
};

/// Rule `mass`: the sums over rows of squares of what a row weighs in a tile, by equation 2.
template <FwdConfig C>
struct TileMeasure<C, Skip::mass> : FourTiles {
  static constexpr float kCap = 4.0F;
  static constexpr float kLargestPower = 100.0F;  // below it no sum is so small that 0 · ∞ could come of it

  float prior[2];   // of this thread's rows, the LSE of the step before in log2; +∞ for a row that is none
  float weight[2];  // 2^(origin − prior)
  float kept[2];    // the rows' sums before this tile
  float mass[2];    // of the tile in work, this thread's columns
  float even[2];    // of the tile before the one in work, of all columns once two lanes have added theirs
  float pair[2];    // of two tiles

  /// `rows`: that are used, from the warp's first on.
  template <class Rows>
  __device__ __forceinline__ void begin(const Rows& priors, int first_row, int rows, int lane) {
    walked = 0;
    block = -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      weight[half] = 0.0F;
      prior[half] = kInfinity;
      if (row < rows) prior[half] = *reinterpret_cast<const float*>(priors.at(first_row + row)) * kLog2E;
    }
  }

  /// The tile in work is of `to`, another key block than the one before or the same. `store(block, sum)` is called by
  /// the lanes that have any for store.
  template <class Store>
  __device__ __forceinline__ void enter(int to, int lane, float /*scale*/, Store store) {
    if (to == block) return;
    if (block >= 0) end(lane, store);
    block = to;
    mass[0] = mass[1] = 0.0F;
  }
  /// After the last tile.
  template <class Store>
  __device__ __forceinline__ void finish(int lane, float /*scale*/, Store store) {
    if (block < 0) return;
    end(lane, store);
    block = -1;
    mass[0] = mass[1] = 0.0F;
#pragma unroll 1
    while ((walked & 3) != 0) end(lane, store);
  }

  /// Before a tile's exponentials are added to `sums`, which are then its own.
  __device__ __forceinline__ void set_aside(float (&sums)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      kept[half] = sums[half];
      sums[half] = 0.0F;
    }
  }
  /// What was set aside follows origins that are raised meanwhile.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) kept[half] *= factor[half];
  }
  /// After that. `moved`: whether any origin may have.
  __device__ __forceinline__ void add(float (&sums)[2], const float (&origin)[2], bool moved) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (moved) weight[half] = ptx::exp2(fminf(origin[half] - prior[half], kLargestPower));
      mass[half] = __fmaf_rn(sums[half], weight[half], mass[half]);
      sums[half] += kept[half];
    }
  }

 private:
  template <class Store>
  __device__ __forceinline__ void end(int lane, Store store) {
    const int turn = walked & 3;
    if ((turn & 1) == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) even[half] = mass[half];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float both = add_in_turn(even[half], mass[half], lane, 1);
        if (turn == 1) {
          pair[half] = both;
        } else {
          pair[half] = add_in_turn(pair[half], both, lane, 2);
        }
      }
    }
    if (!end_tile(lane)) return;
    float sum = 0.0F;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float capped = fminf(pair[half], kCap);  // NaN: kCap; the row tile is known to be unknown then
      if (prior[half] != kInfinity) sum = __fmaf_rn(capped, capped, sum);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffU, sum, step);
    store(mine, sum);
  }
};

/// Rule `threshold`: how far any row's maximum rises in a tile, by equation 7, in octaves.
template <FwdConfig C>
struct TileMeasure<C, Skip::threshold> : FourTiles {
  float before[2];   // largest score of this thread's rows in the tiles before, in log2; +∞ for a row that is none
  float largest[2];  // in the tile in work, of this thread's columns, as the products are
  float rise;        // of this lane's tile

  __device__ __forceinline__ void begin(int rows, int lane) {
    walked = 0;
    block = -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) before[half] = lane / 4 + half * 8 < rows ? -kInfinity : kInfinity;
  }

  /// `scale`: a product's factor to log2.
  template <class Store>
  __device__ __forceinline__ void enter(int to, int lane, float scale, Store store) {
    if (to == block) return;
    if (block >= 0) end(lane, scale, store);
    block = to;
    largest[0] = largest[1] = -kInfinity;
  }
  template <class Store>
  __device__ __forceinline__ void finish(int lane, float scale, Store store) {
    if (block < 0) return;
    end(lane, scale, store);
    block = -1;
    largest[0] = largest[1] = -kInfinity;
#pragma unroll 1
    while ((walked & 3) != 0) end(lane, scale, store);
  }

  /// One 16 x 8 tile of scores, before they are probabilities.
  __device__ __forceinline__ void see(const float (&s)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) largest[half] = fmaxf(largest[half], fmaxf(s[half * 2], s[half * 2 + 1]));
  }

 private:
  // A row without a score here, or without rows, rises by −∞ − x or NaN, which fmaxf leaves out.
  template <class Store>
  __device__ __forceinline__ void end(int lane, float scale, Store store) {
    float most = -kInfinity;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float maximum = quad_maximum(largest[half]) * scale;
      most = fmaxf(most, maximum - before[half]);
      before[half] = fmaxf(before[half], maximum);
    }
    if ((walked & 3) == (lane & 3)) rise = most;
    if (!end_tile(lane)) return;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) rise = fmaxf(rise, __shfl_xor_sync(0xffffffffU, rise, step));
    store(mine, rise);
  }
};

/// What rows [first_row, + 16) of a block say in the end: keeps their LSE for the next step, and returns whether a
/// row's masses are unknown. By a warp. `rows`: that are used, from the warp's first on.
template <FwdConfig C, class Online, class Rows>
__device__ __forceinline__ bool end_rows(const TileMeasure<C>& measure, const Online& softmax, const Rows& lse,
                                         int first_row, int rows, int lane) {
  bool unknown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    const float sum = quad_sum(softmax.sum[0][half]);
    const float own = sum == 0.0F ? -kInfinity : __fmaf_rn(softmax.origin[0][half], kLn2, ptx::log2(sum) * kLn2);
    if (row >= rows) continue;
    bool known = fabsf(own) < kInfinity;
    if constexpr (C.skip == Skip::mass) {
      known = known && fabsf(measure.prior[half]) < kInfinity;
      if (lane % 4 == 0) *reinterpret_cast<float*>(lse.writable(first_row + row)) = own;
    }
    unknown |= own != -kInfinity && !known;
  }
  return __any_sync(0xffffffffU, unknown) != 0;
}

}  // namespace tessera::cuda
