// SPDX-License-Identifier: Apache-2.0
// Corrections that scaled scores of a tile lack, each for a whole row, or for a row and neighbouring columns. A summand
// is subtracted from the row's origin instead; a factor multiplies the scale.
#pragma once

#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// The correction of a thread's two rows, in units of log2: none.
struct NoShift {
  static constexpr int columns = 0;          // columns that share a factor, besides their row's; 0: there is none
  static constexpr bool recomputes = false;  // whether some row's probabilities are to be computed again
  __device__ __forceinline__ float scaled(float score, float scale, int /*half*/) const { return score * scale; }
  __device__ __forceinline__ float below(float origin, int /*half*/) const { return origin; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// A summand for each row, which its scaled scores lack.
struct RowShift {
  static constexpr int columns = 0;
  static constexpr bool recomputes = false;
  float by[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return __fmaf_rn(score, scale, by[half]);
  }
  /// The origin for scaled scores that lack the summand.
  __device__ __forceinline__ float below(float origin, int half) const { return origin - by[half]; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// The same, but with is_scaled the scores are scaled already and lack nothing.
struct LinearShift : RowShift {
  bool is_scaled;
  bool recomputes;
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return RowShift::scaled(score, of_row(scale, half), half);
  }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return is_scaled ? 1.0F : scale; }
};
/// A RowShift with a factor for each row, which includes the scale.
struct RowScale : RowShift {
  float factor[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return RowShift::scaled(score, of_row(scale, half), half);
  }
  __device__ __forceinline__ float of_row(float /*scale*/, int half) const { return factor[half]; }
};
/// The same, with another factor for each `shared` neighbouring columns of a tile.
template <int shared>
struct ColumnScale : RowScale {
  static constexpr int columns = shared;
  u32 factors;  // shared memory address of the first group's factor

  /// The correction of the `group`-th group of columns.
  __device__ __forceinline__ RowScale of_columns(int group) const {
    const float of_group = ptx::load_shared_4(factors + static_cast<u32>(group) * 4);
    return {{by[0], by[1]}, {factor[0] * of_group, factor[1] * of_group}};
  }
};

}  // namespace tessera::cuda
