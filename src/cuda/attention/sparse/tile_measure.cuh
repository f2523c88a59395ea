// SPDX-License-Identifier: Apache-2.0
// What a warp's 16 rows measure of the tiles of a skip state's list while they walk them (docs/skip-state.md): one
// number for each tile. The owner of the row tile combines it with those of the other warps. Each lane has some columns
// of two rows; lanes combine theirs once for every four tiles. Here a tile is one of the list, a key block, which may
// have several of the kernel's tiles.
#pragma once

#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/tiles/tile_list.cuh"

namespace tessera::cuda {

/// The parameters of the state. Only kernels with FwdConfig::skip have them.
__device__ __forceinline__ const SkipParams& skip_of_params(const AttentionParams& p) {
  return static_cast<const SkipFwdParams&>(static_cast<const FwdParams&>(p)).skip;
}

/// The key block to which a kernel's tile belongs.
__device__ __forceinline__ int key_block_of(const ListParams& list, const KvTile& tile) {
  return ptx::divide(tile.first, list.block_kv) + (tile.segment == 0 ? 0 : list.second_block);
}

/// With wgmma: where the warps store what their rows measure in row tile `item` of this thread block, (warp, key
/// block).
template <FwdConfig C>
__device__ __forceinline__ float* partials(const AttentionParams& p, int item) {
  const i64 row_tile = static_cast<i64>(blockIdx.x) * 2 + (item & 1);
  return skip_of_params(p).partials + row_tile * C.warps * p.list.key_blocks;
}

/// How lanes combine their columns of a row: by the sum, or by the maximum.
struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Largest {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

/// For each tile a lane has a number for its columns of row lane / 4, and one for those of row lane / 4 + 8. After four
/// tiles it gets two numbers over all columns: those of rows row_of(lane) and row_of(lane) + 8 in tile tile_of(lane) of
/// the four. The four lanes with the same row_of(lane) are tile_step lanes apart. With mma.sync, whose tiles leave no
/// room in shared memory, lanes combine numbers by shuffles.
template <FwdConfig C, class Op, bool in_memory = C.products == Products::wgmma>
struct FourTiles {
  static constexpr int tile_step = 1;
  static constexpr bool waits_for_four = false;  // whether end() may only be called after four tiles
  float even[2];                                 // numbers of the previous tile
  float pair[2];                                 // numbers of two tiles, combined by two lanes

  static __device__ __forceinline__ int tile_of(int lane) { return lane & 3; }
  static __device__ __forceinline__ int row_of(int lane) { return lane / 4; }

  /// Ends tile `turn` of the four, with these numbers; the last one sets `rows`. A whole warp calls this.
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
  // Combines the numbers of the two lanes that differ in bit `step`: a for the lane without it, b for the lane with it.
  static __device__ __forceinline__ float exchange(float a, float b, int lane, int step) {
    const bool upper = (lane & step) != 0;
    const float got = __shfl_xor_sync(0xffffffffU, upper ? a : b, step);
    return Op::of(upper ? b : a, got);
  }
};

/// With wgmma, lanes combine numbers through shared memory, because shuffles would take more instructions.
template <FwdConfig C, class Op>
struct FourTiles<C, Op, true> {
  static constexpr int tile_step = 8;
  static constexpr bool waits_for_four = true;

  static __device__ __forceinline__ int tile_of(int lane) { return lane / 8; }
  static __device__ __forceinline__ int row_of(int lane) { return lane & 7; }

  /// Stores the numbers of tile `turn`, which may not have ended yet: the last call for a tile counts.
  template <class Out>
  static __device__ __forceinline__ void put(const float (&numbers)[2], int turn, int lane, const Out& out) {
    out.scratch()[turn * 32 + lane] = make_float2(numbers[0], numbers[1]);
  }
  template <class Out>
  static __device__ __forceinline__ void end(const float (& /*numbers*/)[2], int /*turn*/, int lane, const Out& out,
                                             float (&rows)[2]) {
    __syncwarp();
    const float4* const of_rows =
        reinterpret_cast<const float4*>(out.scratch() + lane * 4);  // four lanes had some columns each
    const float4 a = of_rows[0];
    const float4 b = of_rows[1];
    rows[0] = Op::of(Op::of(a.x, a.z), Op::of(b.x, b.z));
    rows[1] = Op::of(Op::of(a.y, a.w), Op::of(b.y, b.w));
    __syncwarp();
  }
};

/// Combines the numbers of the lanes that have the same tile.
template <class Four, class Op>
__device__ __forceinline__ float over_rows(float number) {
  constexpr int first = Four::tile_step == 1 ? 4 : 1;
#pragma unroll
  for (int step = first; step < first * 8; step *= 2) {
    number = Op::of(number, __shfl_xor_sync(0xffffffffU, number, step));
  }
  return number;
}

/// The part that both rules share: the sequence of key blocks. `numbers` of the rule are those of the current one. Each
/// function's `out` takes the numbers of ended blocks: one lane for each tile calls out.store(tile of the four, key
/// block or −1, number). With wgmma, out.scratch() is the warp's share of measured_bytes().
template <class Rule>
struct KeyBlocks {
  int walked = 0;  // the number of key blocks that have ended
  int block = -1;  // that of the current tile; −1 before the first
  int mine;        // key block of this lane's tile of the four; −1: none

  __device__ __forceinline__ void restart() {
    walked = 0;
    block = -1;
  }
  /// Begins a tile of key block `to`; must precede any use of its scores. `softmax`: the state after the tiles before.
  template <class Online, class Out>
  __device__ __forceinline__ void enter(int to, int lane, float scale, Online& softmax, const Out& out) {
    rule().take(softmax);
    const bool changes = to != block;
    end(changes && block >= 0, lane, scale, out);
    if (changes) rule().clear();
    block = to;
  }
  /// Must follow the last tile.
  template <class Online, class Out>
  __device__ __forceinline__ void finish(int lane, float scale, Online& softmax, const Out& out) {
    using Four = typename Rule::Four;
    rule().take(softmax);
    if (block >= 0) end(true, lane, scale, out);
    block = -1;
    if constexpr (Four::waits_for_four) {
      if (const int last = walked & 3; last != 0) {  // the others of the four do not exist
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
  // Ends tile `turn` of the four, and with the last one stores the numbers of all four.
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

/// Configurations without `skip` measure nothing.
template <FwdConfig C, Skip rule = C.skip>
struct TileMeasure {};

/// Rule `mass`: the sum over rows of the squared mass of a row in a tile, by equation 2.
template <FwdConfig C>
struct TileMeasure<C, Skip::mass> : KeyBlocks<TileMeasure<C, Skip::mass>> {
  using Four = FourTiles<C, Sum>;
  static constexpr float kCap = 4.0F;
  static constexpr float kLargestPower = 100.0F;  // bounds weights, so that 0 · ∞ cannot occur

  int used;         // rows in use, from the warp's first on
  float prior[2];   // the LSE of this thread's rows in the step before; +∞ for rows that do not exist. It is not used
                    // before the end of the first tile, so that nothing waits for the load
  float weight[2];  // 2^(origin − prior)
  bool moved;       // whether an origin may have changed since
  float kept[2];    // the rows' sums before the current tile
  float numbers[2];  // masses in the current key block, of this thread's columns
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

  /// Takes what the tile before has added to the rows' sums: softmax.sum is that tile's sum only. It runs before the
  /// next tile, not after the exponentials, because that is 1 to 4% faster (docs/experiments/gpu-skip.md).
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
  /// Must be called if origins were raised.
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) kept[half] *= factor[half];
    moved = true;
  }

  __device__ __forceinline__ float of_tile(const float (&rows)[2], int lane, float /*scale*/) const {
    float sum = 0.0F;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float capped = fminf(rows[half], kCap);  // NaN becomes kCap; the row tile then is `unknown`
      if (Four::row_of(lane) + half * 8 < used) sum = __fmaf_rn(capped, capped, sum);
    }
    return over_rows<Four, Sum>(sum);
  }
};

/// Rule `threshold`: the largest rise of a row's maximum in a tile, in octaves, by equation 7.
template <FwdConfig C>
struct TileMeasure<C, Skip::threshold> : KeyBlocks<TileMeasure<C, Skip::threshold>> {
  using Four = FourTiles<C, Largest>;
  float before[2];  // largest score in the tiles before, in log2, of the rows that this lane has after four tiles; +∞
                    // for rows that do not exist
  float numbers[2];  // largest product in the current key block, of this thread's columns, not scaled
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
  /// Takes one 16 x 8 tile of scores, before they become probabilities.
  __device__ __forceinline__ void see(const float (&s)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) numbers[half] = fmaxf(numbers[half], fmaxf(s[half * 2], s[half * 2 + 1]));
  }

  /// `scale`: the factor from products to log2. For a row that has no score here or does not exist, the rise is −∞ or
  /// NaN, which fmaxf ignores.
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

/// Ends the measurement of rows [first_row, + 16) of a block: with rule `mass` stores their LSE for the next step, and
/// returns whether the masses of some row are unknown. A whole warp calls this. `rows`: rows in use, from the warp's
/// first on.
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
