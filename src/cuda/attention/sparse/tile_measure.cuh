// SPDX-License-Identifier: Apache-2.0
// What a warp's 16 rows say of the tiles of a skip state's list while they walk them (docs/skip-state.md): one number a
// tile, which who owns the row tile brings together with those of the other warps. Each lane has a part of two rows;
// lanes bring theirs together once for four tiles.
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

/// Brings together what lanes have of a row's columns: sums, or the largest.
struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Largest {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

/// A lane has a number of its columns of rows lane / 4 and lane / 4 + 8 in each tile. After four tiles it has both
/// numbers of rows row_of(lane) and row_of(lane) + 8, of all columns, in tile tile_of(lane) of the four. Lanes that
/// differ by tile_step, or 2 or 3 of it, have the same rows of other tiles. By mma.sync, whose tiles leave no room in
/// shared memory, lanes exchange numbers.
template <FwdConfig C, class Op, bool in_memory = C.products == Products::wgmma>
struct FourTiles {
  static constexpr int tile_step = 1;
  static constexpr bool waits_for_four = false;  // until there are four, end() does nothing
  float even[2];                                 // of the tile before
  float pair[2];                                 // of two tiles, once two lanes have brought theirs together

  static __device__ __forceinline__ int tile_of(int lane) { return lane & 3; }
  static __device__ __forceinline__ int row_of(int lane) { return lane / 4; }

  /// Tile `turn` is done, with these numbers; `rows` with the last of the four. By the warp.
  template <class Out>
  __device__ __forceinline__ void end(const float (&numbers)[2], int turn, int lane, const Out& /*out*/,
                                      float (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((turn & 1) == 0) {
        even[half] = numbers[half];
        continue;
      }
      const float both = exchange(even[half], numbers[half], lane, 1);
      if (turn == 1) {
        pair[half] = both;
      } else {
        rows[half] = exchange(pair[half], both, lane, 2);
      }
    }
  }

 private:
  // a of the lanes without, b of those with `step` in their number, of the two lanes that differ in it.
  static __device__ __forceinline__ float exchange(float a, float b, int lane, int step) {
    const bool upper = (lane & step) != 0;
    const float got = __shfl_xor_sync(0xffffffffU, upper ? a : b, step);
    return Op::of(upper ? b : a, got);
  }
};

/// By wgmma, where an exchange of registers takes more instructions, lanes leave their numbers in shared memory.
template <FwdConfig C, class Op>
struct FourTiles<C, Op, true> {
  static constexpr int tile_step = 8;
  static constexpr bool waits_for_four = true;

  static __device__ __forceinline__ int tile_of(int lane) { return lane / 8; }
  static __device__ __forceinline__ int row_of(int lane) { return lane & 7; }

  /// Before that, of a tile that may not be done.
  template <class Out>
  static __device__ __forceinline__ void put(const float (&numbers)[2], int turn, int lane, const Out& out) {
    out.scratch()[turn * 32 + lane] = make_float2(numbers[0], numbers[1]);
  }
  template <class Out>
  static __device__ __forceinline__ void end(const float (& /*numbers*/)[2], int /*turn*/, int lane, const Out& out,
                                             float (&rows)[2]) {
    __syncwarp();
    const float4* const of_rows =
        reinterpret_cast<const float4*>(out.scratch() + lane * 4);  // four lanes had columns each
    const float4 a = of_rows[0];
    const float4 b = of_rows[1];
    rows[0] = Op::of(Op::of(a.x, a.z), Op::of(b.x, b.z));
    rows[1] = Op::of(Op::of(a.y, a.w), Op::of(b.y, b.w));
    __syncwarp();
  }
};

/// Of the lanes that have the same tile.
template <class Four, class Op>
__device__ __forceinline__ float over_rows(float number) {
  constexpr int first = Four::tile_step == 1 ? 4 : 1;
#pragma unroll
  for (int step = first; step < first * 8; step *= 2) {
    number = Op::of(number, __shfl_xor_sync(0xffffffffU, number, step));
  }
  return number;
}

/// What both rules do with key blocks; `numbers` of the rule are of the one in work. `out`: who takes their numbers, by
/// store(tile of four, its key block or −1, its number), which a lane of each tile calls; by wgmma also scratch(),
/// the warp's share of measured_bytes().
template <class Rule>
struct KeyBlocks {
  int walked = 0;  // key blocks that were ended
  int block = -1;  // that the tile in work is of; none before the first
  int mine;        // of this lane's tile of four; none: −1

  __device__ __forceinline__ void restart() {
    walked = 0;
    block = -1;
  }
  /// Another tile, of key block `to`, before anything is done with its scores. `softmax`: of the tiles before.
  template <class Online, class Out>
  __device__ __forceinline__ void enter(int to, int lane, float scale, Online& softmax, const Out& out) {
    rule().take(softmax);
    const bool changes = to != block;
    end(changes && block >= 0, lane, scale, out);
    if (changes) rule().clear();
    block = to;
  }
  /// After the last tile.
  template <class Online, class Out>
  __device__ __forceinline__ void finish(int lane, float scale, Online& softmax, const Out& out) {
    using Four = typename Rule::Four;
    rule().take(softmax);
    if (block >= 0) end(true, lane, scale, out);
    block = -1;
    if constexpr (Four::waits_for_four) {
      if (const int last = walked & 3; last != 0) {  // of those that are not there nobody is told
        if (Four::tile_of(lane) >= last) mine = -1;
        end_four(3, lane, scale, out);
      }
    } else {
      rule().clear();
#pragma unroll 1
      while ((walked & 3) != 0) end(true, lane, scale, out);
    }
    rule().give_back(softmax);
  }

 private:
  __device__ __forceinline__ Rule& rule() { return static_cast<Rule&>(*this); }
  template <class Out>
  __device__ __forceinline__ void end(bool ends, int lane, float scale, const Out& out) {
    using Four = typename Rule::Four;
    const int turn = walked & 3;
    if constexpr (Four::waits_for_four) Four::put(rule().numbers, turn, lane, out);
    if (ends && turn == Four::tile_of(lane)) mine = block;
    if (ends) ++walked;
    if (!ends || (Four::waits_for_four && turn != 3)) return;
    end_four(turn, lane, scale, out);
  }
  // With tile `turn` of the four.
  template <class Out>
  __device__ __forceinline__ void end_four(int turn, int lane, float scale, const Out& out) {
    using Four = typename Rule::Four;
    float rows[2];
    rule().four.end(rule().numbers, turn, lane, out, rows);
    if (turn != 3) return;
    const float number = rule().of_tile(rows, lane, scale);
    if (Four::row_of(lane) == 0) out.store(Four::tile_of(lane), mine, number);
  }
};

/// Of configurations without `skip`: nothing.
template <FwdConfig C, Skip rule = C.skip>
struct TileMeasure {};

/// Rule `mass`: the sums over rows of squares of what a row weighs in a tile, by equation 2.
template <FwdConfig C>
struct TileMeasure<C, Skip::mass> : KeyBlocks<TileMeasure<C, Skip::mass>> {
  using Four = FourTiles<C, Sum>;
  static constexpr float kCap = 4.0F;
  static constexpr float kLargestPower = 100.0F;  // below it no sum is so small that 0 · ∞ could come of it

  int used;        // rows, from the warp's first on
  float prior[2];  // of this thread's rows, the LSE of the step before; +∞ for a row that is none. It is not looked at
                   // before the first tile is done, so that nobody waits for it
  float weight[2];   // 2^(origin − prior)
  bool moved;        // whether an origin may have since
  float kept[2];     // the rows' sums before the tile in work
  float numbers[2];  // masses in the key block in work, this thread's columns
  Four four;

  template <class Rows>
  __device__ __forceinline__ void begin(const Rows& priors, int first_row, int rows, int lane) {
    this->restart();
    used = rows;
    moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      weight[half] = kept[half] = 0.0F;
      prior[half] = kInfinity;
      if (row < rows) prior[half] = *reinterpret_cast<const float*>(priors.at(first_row + row));
    }
  }
  __device__ __forceinline__ void clear() { numbers[0] = numbers[1] = 0.0F; }

  /// Takes what the tile before has added to the rows' sums, of which the softmax has the tile's own alone. It stands
  /// here and not behind the exponentials because that is 1 to 4% faster (docs/experiments/gpu-skip.md).
  template <class Online>
  __device__ __forceinline__ void take(Online& softmax) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = softmax.sum[0][half];
      if (moved) {
        const float power = __fmaf_rn(-prior[half], kLog2E, softmax.origin[0][half]);
        weight[half] = ptx::exp2(fminf(power, kLargestPower));
      }
      numbers[half] = __fmaf_rn(sum, weight[half], numbers[half]);
      kept[half] += sum;
      sum = 0.0F;
    }
    moved = false;
  }
  template <class Online>
  __device__ __forceinline__ void give_back(Online& softmax) const {
    softmax.sum[0][0] = kept[0];
    softmax.sum[0][1] = kept[1];
  }
  /// The origins were raised.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) kept[half] *= factor[half];
    moved = true;
  }

  __device__ __forceinline__ float of_tile(const float (&rows)[2], int lane, float /*scale*/) const {
    float sum = 0.0F;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float capped = fminf(rows[half], kCap);  // NaN: kCap; the row tile is known to be unknown then
      if (Four::row_of(lane) + half * 8 < used) sum = __fmaf_rn(capped, capped, sum);
    }
    return over_rows<Four, Sum>(sum);
  }
};

/// Rule `threshold`: how far any row's maximum rises in a tile, by equation 7, in octaves.
template <FwdConfig C>
struct TileMeasure<C, Skip::threshold> : KeyBlocks<TileMeasure<C, Skip::threshold>> {
  using Four = FourTiles<C, Largest>;
  float before[2];  // largest score in the tiles before, in log2, of the rows that this lane has of four tiles; +∞ for
                    // a row that is none
  float numbers[2];  // largest score in the key block in work, of this thread's columns, as the products are
  Four four;

  __device__ __forceinline__ void begin(int rows, int lane) {
    this->restart();
#pragma unroll
    for (int half = 0; half < 2; ++half) before[half] = Four::row_of(lane) + half * 8 < rows ? -kInfinity : kInfinity;
  }
  __device__ __forceinline__ void clear() { numbers[0] = numbers[1] = -kInfinity; }

  template <class Online>
  __device__ __forceinline__ void take(Online& /*softmax*/) {}
  template <class Online>
  __device__ __forceinline__ void give_back(Online& /*softmax*/) const {}
  /// One 16 x 8 tile of scores, before they are probabilities.
  __device__ __forceinline__ void see(const float (&s)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) numbers[half] = fmaxf(numbers[half], fmaxf(s[half * 2], s[half * 2 + 1]));
  }

  /// `scale`: a product's factor to log2. A row without a score here, or without rows, rises by −∞ − x or NaN, which
  /// fmaxf leaves out.
  __device__ __forceinline__ float of_tile(const float (&rows)[2], int lane, float scale) {
    constexpr int step = Four::tile_step;
    const int tile = Four::tile_of(lane);
    float most = -kInfinity;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = rows[half] * scale;
      float last = fmaxf(before[half], own);  // up to this tile
#pragma unroll
      for (int tiles = 1; tiles < 4; tiles *= 2) {
        const float earlier = __shfl_up_sync(0xffffffffU, last, tiles * step);
        if (tile >= tiles) last = fmaxf(last, earlier);
      }
      const float earlier = __shfl_up_sync(0xffffffffU, last, step);
      most = fmaxf(most, own - (tile == 0 ? before[half] : earlier));
      before[half] = __shfl_sync(0xffffffffU, last, (lane - tile * step) + 3 * step);
    }
    return over_rows<Four, Largest>(most);
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
