// SPDX-License-Identifier: Apache-2.0
// What scaled scores of a tile lack, the same for all of a row: it is added to the row's origin instead, or multiplies
// the scale.
#pragma once

namespace tessera::cuda {

/// What a tile's scores of a thread's two rows lack, in units of log2: nothing.
struct NoShift {
  __device__ __forceinline__ float scaled(float score, float scale, int /*half*/) const { return score * scale; }
  __device__ __forceinline__ float below(float origin, int /*half*/) const { return origin; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// A number for each row, which is added to every scaled score.
struct RowShift {
  float by[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return __fmaf_rn(score, scale, by[half]);
  }
  /// The origin of scaled scores without it.
  __device__ __forceinline__ float below(float origin, int half) const { return origin - by[half]; }
  __device__ __forceinline__ float of_row(float scale, int /*half*/) const { return scale; }
};
/// The same where each row has a factor too.
struct RowScale : RowShift {
  float factor[2];
  __device__ __forceinline__ float scaled(float score, float scale, int half) const {
    return RowShift::scaled(score, of_row(scale, half), half);
  }
  /// The factor of its scores that `scale` is a part of.
  __device__ __forceinline__ float of_row(float scale, int half) const { return scale * factor[half]; }
};

}  // namespace tessera::cuda
