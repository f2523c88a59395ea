// SPDX-License-Identifier: Apache-2.0
// What scaled scores of a tile lack, the same for all of a row, or of a row and neighbouring columns: it is added to
// the row's origin instead, or multiplies the scale.
#pragma once

#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// What a tile's scores of a thread's two rows lack, in units of log2: nothing.
struct NoShift {
  static constexpr int columns = 0;          // that share a factor besides their row's; 0: there is none
  static constexpr bool recomputes = false;  // whether some row's probabilities are to be computed again
  __device__ __forceinline__ float scaled(float score, float scale, int /*half*/) const { return score * scale; }
  __device__ __forceinline__ float below(float origin, int /*half*/) const { return origin; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// A number for each row, which is added to every scaled score.
struct RowShift {
  static constexpr int columns = 0;
  static constexpr bool recomputes = false;
  float by[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return __fmaf_rn(score, scale, by[half]);
  }
  /// The origin of scaled scores without it.
  __device__ __forceinline__ float below(float origin, int half) const { return origin - by[half]; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// The same, unless the scores are scaled already and lack nothing.
struct LinearShift : RowShift {
  bool is_scaled;
  bool recomputes;
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return RowShift::scaled(score, of_row(scale, half), half);
  }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return is_scaled ? 1.0F : scale; }
};
/// A RowShift where each row has a factor too, which has the scale in it.
struct RowScale : RowShift {
  float factor[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return RowShift::scaled(score, of_row(scale, half), half);
  }
  __device__ __forceinline__ float of_row(float /*scale*/, int half) const { return factor[half]; }
};
/// The same where each `shared` neighbouring columns of a tile have a factor too.
template <int shared>
struct ColumnScale : RowScale {
  static constexpr int columns = shared;
  u32 factors;  // of the columns: where the first is in shared memory

  /// Of the `group`-th columns.
  __device__ __forceinline__ RowScale of_columns(int group) const {
    const float of_group = ptx::load_shared_4(factors + static_cast<u32>(group) * 4);
    return {{by[0], by[1]}, {factor[0] * of_group, factor[1] * of_group}};
  }
};

}  // namespace tessera::cuda
