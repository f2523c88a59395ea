// SPDX-License-Identifier: Apache-2.0
// Online softmax of a warp's rows (Milakov and Gimelshein 2018, arXiv 1805.02867), to base 2. A thread holds the rows
// 16·m + lane/4 and + 8 of its warp; four neighbouring lanes share a row.
#pragma once

#include "cuda/attention/scores/row_shift.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

__device__ __forceinline__ float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

/// `slack_bits`: probabilities may be up to 2^slack_bits. fp16 has 2^15, too; bf16 has the range of fp32, of which the
/// products with V need a part. `rounded_sums`: rounded P is summed too. `offset_bits`: origins are raised to so many
/// bits below the maximum, because P of few bits has more range above 1 than below. If it is negative, they are raised
/// above the maximum, because scores are expected to rise further.
template <int row_tiles, int slack_bits = 15, bool rounded_sums = false, int offset_bits = 0>
struct Softmax {
  static constexpr float kSlack = slack_bits;
  static constexpr float kLowest = -3.4028234e38F;

  // The exponent to which probabilities are relative, in units of log2: near the largest score so far. Before the first
  // key it is the lowest finite number, so that a hidden score, −∞, still gives 0.
  float origin[row_tiles][2];
  float sum[row_tiles][2];      // of this thread's columns
  float rounded[row_tiles][2];  // likewise, of P as rounded for P·V; only with rounded_sums

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        origin[m][half] = kLowest;
        sum[m][half] = 0.0F;
        if constexpr (rounded_sums) rounded[m][half] = 0.0F;
      }
    }
  }

  /// The factors of O that raised origins require.
  struct Rescale {
    float factor[row_tiles][2];
    bool needed;  // by any row of the warp
  };

  /// Raises the origins to the maxima of new scores and rescales sums, but only for rows whose maximum rose by more
  /// than their slack: probabilities up to 2^kSlack lose no precision, and rescaling O is most of the cost of this
  /// step. `scale`: a factor that turns scores into units of log2.
  template <int key_tiles, class Shift = NoShift>
  __device__ __forceinline__ Rescale raise(const Accumulator<row_tiles, key_tiles>& s, float scale,
                                           const float (&slack)[2] = {kSlack, kSlack}, const Shift& shift = {}) {
    Rescale rescale;
    bool moved = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float highest = quad_maximum(highest_scaled(s, m, half, scale, shift));
        // Rounded down: with large scores, rounding to nearest might allow a probability of 2^16.
        const bool rises = highest > __fadd_rd(origin[m][half], slack[half]);
        const float raised = highest - static_cast<float>(offset_bits);
        rescale.factor[m][half] = rises ? ptx::exp2(origin[m][half] - raised) : 1.0F;
        origin[m][half] = rises ? raised : origin[m][half];
        sum[m][half] *= rescale.factor[m][half];
        if constexpr (rounded_sums) rounded[m][half] *= rescale.factor[m][half];
        moved |= rises;
      }
    }
    rescale.needed = __any_sync(0xffffffffU, moved) != 0;
    return rescale;
  }

  /// This thread's highest scaled score of a row.
  template <int key_tiles, class Shift>
  static __device__ __forceinline__ float highest_scaled(const Accumulator<row_tiles, key_tiles>& s, int m, int half,
                                                         float scale, const Shift& shift) {
    constexpr int together = Shift::columns == 0 ? key_tiles : Shift::columns / 8;
    float highest;
#pragma unroll
    for (int first = 0; first < key_tiles; first += together) {
      float of_group = s.tile[m][first][half * 2];
#pragma unroll
      for (int n = first; n < first + together; ++n) {
        of_group = fmaxf(of_group, fmaxf(s.tile[m][n][half * 2], s.tile[m][n][half * 2 + 1]));
      }
      if constexpr (Shift::columns > 0) {
        of_group = shift.of_columns(first / together).scaled(of_group, scale, half);
      } else {
        of_group = shift.scaled(of_group, scale, half);
      }
      highest = first == 0 ? of_group : fmaxf(highest, of_group);
    }
    return highest;
  }

  /// Whether any row of the warp has seen no key yet.
  __device__ __forceinline__ bool lacks_keys() const {
    static_assert(row_tiles == 1);
    return __any_sync(0xffffffffU, origin[0][0] == kLowest || origin[0][1] == kLowest) != 0;
  }
  /// raise() for these rows alone, so that the origin of a row does not depend on other rows.
  template <int key_tiles, class Shift = NoShift>
  __device__ __forceinline__ Rescale raise_first(const Accumulator<1, key_tiles>& s, float scale,
                                                 const Shift& shift = {}) {
    const float slack[2] = {origin[0][0] == kLowest ? kSlack : kInfinity, origin[0][1] == kLowest ? kSlack : kInfinity};
    return raise(s, scale, slack, shift);
  }

  template <int value_tiles>
  static __device__ __forceinline__ void apply(const Rescale& rescale, Accumulator<row_tiles, value_tiles>& o) {
    if (!rescale.needed) return;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < value_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o.tile[m][n][i] *= rescale.factor[m][i / 2];
      }
    }
  }

  /// Whether any row's sum has grown so much since `before` that its origin was too low. If not, each new probability
  /// is at most 2^kSlack.
  __device__ __forceinline__ bool overshoots(const float (&before)[2]) const {
    static_assert(row_tiles == 1);
    const float most = fmaxf(sum[0][0] - before[0], sum[0][1] - before[1]);
    return __any_sync(0xffffffffU, most > kMostSum) != 0;
  }
  static constexpr auto kMostSum = static_cast<float>(1 << slack_bits);
  // follow() leaves sums of about 2^followed_bits: as little as the range of P allows, so that scores that rise further
  // seldom overshoot again. With e4m3, whose smallest number is 2^-9, 32 equal probabilities are then 1. With negative
  // offset_bits the sums are about what raise() makes of a maximum.
  static constexpr bool leaves_more = offset_bits < 0;
  static constexpr float followed_bits = offset_bits > 0 ? 5.0F : leaves_more ? offset_bits : 15.0F - kSlack;

  /// Raises the origins of rows that overshoot, so that what was added since `before` is about 2^followed_bits. Divides
  /// the sums and `s`, the new probabilities, by the same power of two, which does not round. No row depends on
  /// another.
  template <int key_tiles>
  __device__ __forceinline__ void follow(const float (&before)[2], Accumulator<1, key_tiles>& s, Rescale& rescale) {
    if (!rescale.needed) rescale.factor[0][0] = rescale.factor[0][1] = 1.0F;
    rescale.needed = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = quad_maximum(sum[0][half] - before[half]);
      const float power = ptx::log2(__int_as_float(__float_as_int(most) & 0x7f800000)) - followed_bits;
      const float raised = most > kMostSum ? origin[0][half] + power : origin[0][half];
      float left = origin[0][half] - raised;
      origin[0][half] = raised;
#pragma unroll
      for (int step = 0; step < (leaves_more ? 2 : 1); ++step) {  // two factors, because one below 2^-126 would be 0
        if (step > 0 && __any_sync(0xffffffffU, left < 0.0F) == 0) break;
        const float now = leaves_more ? fmaxf(left, -100.0F) : left;
        left -= now;
        const float factor = ptx::exp2(now);
        sum[0][half] *= factor;
        if constexpr (rounded_sums) rounded[0][half] *= factor;
        rescale.factor[0][half] *= factor;
#pragma unroll
        for (int n = 0; n < key_tiles; ++n) {
          s.tile[0][n][half * 2] *= factor;
          s.tile[0][n][half * 2 + 1] *= factor;
        }
      }
    }
  }

  /// Whether any row's sum has grown so much since `before` that follow() may not divide it.
  __device__ __forceinline__ bool overflows(const float (&before)[2]) const {
    static_assert(row_tiles == 1);
    return __any_sync(0xffffffffU, fmaxf(sum[0][0] - before[0], sum[0][1] - before[1]) > kMostFollowed) != 0;
  }
  /// The same for one row.
  __device__ __forceinline__ bool overflows(const float (&before)[2], int half) const {
    return quad_maximum(sum[0][half] - before[half]) > kMostFollowed;
  }
  // The reciprocal of 2^15 times this is still a normal number. Two factors can divide all finite sums.
  static constexpr float kMostFollowed = leaves_more ? 3.0e38F : 1.0e30F;

  /// Computes the probabilities of a row again if its sum has grown too much since `before` for follow(), or if `also`
  /// selects it of a thread's two. restore(which) puts the scores of these rows into `s` again. They become
  /// probabilities relative to their maxima, or to their origins if these are higher.
  template <int key_tiles, class Restore>
  __device__ __forceinline__ void exponentiate_again(float (&before)[2], const bool (&also)[2],
                                                     Accumulator<1, key_tiles>& s, float scale, Rescale& rescale,
                                                     Restore restore) {
    bool which[2] = {overflows(before, 0), overflows(before, 1)};  // all lanes take part
    which[0] = which[0] || also[0];
    which[1] = which[1] || also[1];
    restore(which);
    if (!rescale.needed) rescale.factor[0][0] = rescale.factor[0][1] = 1.0F;
    rescale.needed = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!__any_sync(0xffffffffU, which[half])) continue;
      float highest = s.tile[0][0][half * 2];
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        highest = fmaxf(highest, fmaxf(s.tile[0][n][half * 2], s.tile[0][n][half * 2 + 1]));
      }
      const float raised = fmaxf(quad_maximum(highest) * scale - static_cast<float>(offset_bits), origin[0][half]);
      if (!which[half]) continue;
      const float factor = ptx::exp2(origin[0][half] - raised);
      rescale.factor[0][half] *= factor;
      origin[0][half] = raised;
      before[half] *= factor;
      sum[0][half] = before[half];
      if constexpr (rounded_sums) rounded[0][half] *= factor;
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          float& p = s.tile[0][n][i];
          p = ptx::exp2(__fmaf_rn(p, scale, -raised));
          sum[0][half] += p;
        }
      }
    }
  }

  /// Takes back what was added to the sums since `before`. Sets `slack` for the raise() that follows: rows that
  /// overflow raise their origins to their maxima, and other rows must not change.
  __device__ __forceinline__ void take_back(const float (&before)[2], float (&slack)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slack[half] = quad_maximum(sum[0][half] - before[half]) > kMostFollowed ? 0.0F : kInfinity;
      sum[0][half] = before[half];
    }
  }

  /// Turns a 16 x 8 tile of scores into probabilities. tile_mass.cuh relies on every rounding, so that none is left to
  /// the compiler.
  __device__ __forceinline__ void exponentiate(int m, float (&s)[4], float scale) {
    exponentiate(m, s, {scale, scale}, origin[m]);
  }
  /// The same, relative to given origins and with a scale for each of the two rows.
  __device__ __forceinline__ void exponentiate(int m, float (&s)[4], const float (&scales)[2],
                                               const float (&origins)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = ptx::exp2(__fmaf_rn(s[i], scales[i / 2], -origins[i / 2]));
      sum[m][i / 2] += s[i];
    }
  }

  /// Adds the rounded probabilities of 16 keys, `p`, an A operand.
  template <Element type>
  __device__ __forceinline__ void add_rounded(int m, const u32 (&p)[4]) {
    static_assert(rounded_sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[2];
      ptx::unpack<type>(p[i], pair[0], pair[1]);
      rounded[m][i % 2] += pair[0] + pair[1];
    }
  }

  /// Splits the probabilities of 16 keys into two A operands: `p`, which is rounded, and `rest`, the remainder. Adds
  /// both to the rounded sums.
  template <Element type>
  __device__ __forceinline__ void split(int m, const float (&left)[4], const float (&right)[4], u32 (&p)[4],
                                        u32 (&rest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto& from = i < 2 ? left : right;
      const float pair[2] = {from[i % 2 * 2], from[i % 2 * 2 + 1]};
      float rounded[2];
      p[i] = ptx::pack<type>(pair[0], pair[1]);
      ptx::unpack<type>(p[i], rounded[0], rounded[1]);
      rest[i] = ptx::pack<type>(pair[0] - rounded[0], pair[1] - rounded[1]);
    }
    add_rounded<type>(m, p);
    add_rounded<type>(m, rest);
  }
};

}  // namespace tessera::cuda
