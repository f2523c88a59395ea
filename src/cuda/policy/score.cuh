// SPDX-License-Identifier: Apache-2.0
// From products q·k to scores in units of log2(e), in the order scale, softcap, score callable, ALiBi.
#pragma once

#include "cuda/ptx/math.cuh"
#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// tanh by one exponential: absolute error about 1e-7.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0F - 2.0F * ptx::reciprocal(1.0F + ptx::exp2(2.0F * kLog2E * x));
}

/// One score, in its own units; `distance` is |position of the query − position of the key|, `point` gives the
/// ScorePoint. The forward and tile_mass.cuh are to find the same bits, so that no rounding but that of a callable's
/// text is left to the compiler.
template <FwdConfig C, class Score, class Point>
__device__ __forceinline__ float natural_score_of(float product, const FwdParams& p, float slope, float distance,
                                                  Point point) {
  float score = __fmul_rn(product, p.scale);
  if constexpr (C.softcap) score = p.softcap * tanh_of(score * p.inverse_softcap);
  if constexpr (C.user_score) score = Score::value(score, point(), p.extras);
  if constexpr (C.alibi) score = __fmaf_rn(-slope, distance, score);
  return score;
}

/// The same in units of log2(e). Only for configurations with scale_first.
template <FwdConfig C, class Score, class Point>
__device__ __forceinline__ float score_of(float product, const FwdParams& p, float slope, float distance, Point point) {
  return __fmul_rn(natural_score_of<C, Score>(product, p, slope, distance, point), kLog2E);
}

}  // namespace tessera::cuda
