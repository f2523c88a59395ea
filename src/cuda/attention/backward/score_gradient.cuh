// SPDX-License-Identifier: Apache-2.0
// One element of the scores' gradient, and what both passes share besides: fragments, rows that are not finite, and how
// a gradient leaves.
#pragma once

#include "cuda/attention/softmax/non_finite.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

inline constexpr int kSpoiledFirst = 1, kSpoiledSecond = 2;

/// RowValues of one row.
struct RowValue {
  float lse = kInfinity;
  float delta = 0.0F;
  float weight = 1.0F;
};

/// A probability and the gradient of the score that it came from.
struct ElementGradient {
  float p;   // what dV takes, but for dropout's scale
  float ds;  // of the product q·k, but for the scale
};

/// `score`: a finished one, −∞ where hidden; `product`: q·k; `dp`: dO·v; `scale`: of a score to log2; `spoiled`: by
/// which of the rows that stream (SpoiledRows).
template <BwdConfig B>
__device__ __forceinline__ ElementGradient gradient_of(const FwdParams& p, float score, float product, float dp,
                                                       const RowValue& row, float scale, bool kept, int spoiled) {
  const float probability = ptx::exp2(__fmaf_rn(score, scale, -row.lse));
  float share = B.dropout ? (kept ? dp * p.dropout.scale : 0.0F) : dp;
  if constexpr (B.sink) share *= row.weight;
  ElementGradient g{probability, probability * (share - row.delta)};
  if constexpr (B.softcap != Softcap::none) {
    // 1 − tanh², of which nothing cancels: 4·e / (1 + e)² with e = exp(−2·|u|).
    const float e = ptx::exp2(-fabsf(product * p.scale) * p.softcap.exponent);
    const float inverse = ptx::reciprocal(1.0F + e);
    g.ds *= 4.0F * e * inverse * inverse;
  }
  if constexpr (B.sink) g.p *= row.weight;
  if (B.dropout && !kept) g.p *= 0.0F;  // a NaN stays one
  constexpr float nan = __builtin_bit_cast(float, 0x7fffffffU);
  if (spoiled != 0) g.ds = nan;
  if ((spoiled & kSpoiledFirst) != 0 || (spoiled != 0 && kept)) g.p = nan;  // dO of a dropped key is not looked at
  // Selected and not multiplied: a hidden key's V, or a hidden row's dO, may be NaN.
  if (score == -kInfinity) g.p = g.ds = 0.0F;
  return g;
}

/// Two neighbouring 16 x 8 tiles as an A operand.
template <Element type>
__device__ __forceinline__ void pack_fragment(u32 (&a)[1][4], const float (&left)[4], const float (&right)[4]) {
  a[0][0] = ptx::pack<type>(left[0], left[1]);
  a[0][1] = ptx::pack<type>(left[2], left[3]);
  a[0][2] = ptx::pack<type>(right[0], right[1]);
  a[0][3] = ptx::pack<type>(right[2], right[3]);
}

/// Which rows of the tiles that stream hold a value that is not finite, of Q and of dO, or of K. 0 · NaN is not 0, so
/// zeros take the places of such values; elements that see the row become NaN instead.
template <BwdConfig B>
struct SpoiledRows {
  unsigned char first[B.stream_rows()], second[B.stream_rows()];

  __device__ __forceinline__ int of(int row) const {
    return (first[row] != 0 ? kSpoiledFirst : 0) | (second[row] != 0 ? kSpoiledSecond : 0);
  }

  // Those below are called by all threads of the block, while nobody else uses the tile; `thread`: of them.

  template <class Tile>
  static __device__ __forceinline__ bool are_finite(u32 tile, int thread) {
    FiniteTest<B.type> test;
#pragma unroll 2
    for (int at = thread * 16; at < Tile::bytes; at += B.threads() * 16) {
      u32 value[4];
      ptx::load_shared_16(value, tile + at);
      test.look_at(value);
    }
    return test.passed();
  }
  __device__ __forceinline__ void clear(int thread) {
    for (int row = thread; row < B.stream_rows(); row += B.threads()) first[row] = second[row] = 0;
    __syncthreads();
  }
  template <class Tile>
  static __device__ __forceinline__ void replace(u32 tile, unsigned char* spoiled, int thread) {
#pragma unroll 1
    for (int at = thread * 16; at < Tile::bytes; at += B.threads() * 16) {
      u32 value[4];
      ptx::load_shared_16(value, tile + at);
      bool replaced = false;
#pragma unroll
      for (u32& pair : value) {
        const u32 kept = finite_of<B.type>(pair);
        replaced |= pair != kept;
        pair = kept;
      }
      if (!replaced) continue;
      spoiled[Tile::row_of(at)] = 1;
      ptx::store_shared_16(tile + at, value);
    }
  }
};

/// A warp's 16 rows of a gradient, times `factor`, to memory. `to(row)`: address of row `row` of the 16, or null for
/// none; `is_used(row)`: whether there is a gradient, else it is 0, whatever the sums hold.
template <Element gradient, int tiles, class To, class IsUsed>
__device__ __forceinline__ void store_gradient(const Accumulator<1, tiles>& sums, float factor, int columns,
                                               bool accumulates, int lane, To to, IsUsed is_used) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    char* at = to(row);
    if (at == nullptr) continue;
    const bool used = is_used(row);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      if (column >= columns) break;
      float2 value = make_float2(0.0F, 0.0F);
      if (used) value = make_float2(sums.tile[0][n][half * 2] * factor, sums.tile[0][n][half * 2 + 1] * factor);
      if constexpr (gradient == Element::fp32) {
        float2& sum = *reinterpret_cast<float2*>(at + column * 4);
        sum = accumulates ? make_float2(sum.x + value.x, sum.y + value.y) : value;
      } else {
        *reinterpret_cast<u32*>(at + column * 2) = ptx::pack<gradient>(value.x, value.y);
      }
    }
  }
}

}  // namespace tessera::cuda
