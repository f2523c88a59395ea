// SPDX-License-Identifier: Apache-2.0
// Turns products q·k into scores times log2(e), in the order scale, softcap, score callable, ALiBi.
#pragma once

#include "cuda/ptx/math.cuh"
#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// What scores require of a configuration.
template <class Config>
concept ScoreConfig = requires(const Config& c) {
  Softcap{c.softcap};
  bool{c.user_score};
  bool{c.alibi};
};

/// Returns cap · tanh(score / cap). With u = score / cap:
/// exponential: tanh(u) = 1 − 2 / (1 + e^2u). Cancellation makes it off by a rounding of the cap, whatever the score.
/// rational: below |u| = 8, tanh(u) / u is the rational function of u² that is nearest in relative error (1.5e-7); from
/// there on tanh is 1 (2.3e-7). With all roundings the result is off by at most 9 ulp, 6.3e-7 of the score, for every
/// cap and score (18 caps from 1e-45 to 3.4e38, a million scores each; `reciprocal` off by 1 ulp either way).
template <Softcap form>
__device__ __forceinline__ float capped(float score, const SoftcapParams& cap) {
  if constexpr (form == Softcap::exponential) {
    const float power = ptx::exp2(__fmul_rn(score, cap.exponent));
    return __fmaf_rn(-2.0F * cap.cap, ptx::reciprocal(__fadd_rn(power, 1.0F)), cap.cap);
  }
  const float u = __fmul_rn(score, cap.factor);  // times a constant, so that both leading coefficients are 1
  const float square = __fmul_rn(u, u);
  float above = __fadd_rn(square, 5.55643034F);
  above = __fmaf_rn(above, square, 5.23703432F);
  above = __fmaf_rn(above, square, 0.871850252F);
  float below = __fadd_rn(square, 20.8838272F);
  below = __fmaf_rn(below, square, 44.8418922F);
  below = __fmaf_rn(below, square, 18.7425079F);
  below = __fmaf_rn(below, square, 0.871850371F);
  const float inside = __fmul_rn(score, __fmul_rn(above, ptx::reciprocal(below)));
  return fabsf(score) >= cap.saturated ? copysignf(cap.cap, score) : inside;  // a NaN stays a NaN
}

/// The derivative of capped(): 1 − tanh², computed without cancellation as 4·e / (1 + e)² with e = exp(−2·|u|).
__device__ __forceinline__ float capped_derivative(float score, const SoftcapParams& cap) {
  const float e = ptx::exp2(-fabsf(score) * cap.exponent);
  const float inverse = ptx::reciprocal(1.0F + e);
  return 4.0F * e * inverse * inverse;
}

/// Returns one score, in natural units. `distance`: |position of the query − position of the key|; point(): the
/// ScorePoint; `Position`: the integer type in which a callable may compute. The forward and tile_mass.cuh must compute
/// the same bits, so that only roundings within a callable's text are left to the compiler.
template <ScoreConfig auto C, class Score, class Position, class Point>
__device__ __forceinline__ float natural_score_of(float product, const AttentionParams& p, float slope, float distance,
                                                  Point point) {
  float score = __fmul_rn(product, p.scale);
  if constexpr (C.softcap != Softcap::none) score = capped<C.softcap>(score, p.softcap);
  if constexpr (C.user_score) score = Score::template value<Position>(score, point(), p.extras);
  if constexpr (C.alibi) score = __fmaf_rn(-slope, distance, score);
  return score;
}

/// Returns the derivative of natural_score_of() with respect to scale · product. Only for configurations with
/// user_score; ALiBi's share is 1.
template <ScoreConfig auto C, class Score, class Position, class Point>
__device__ __forceinline__ float score_derivative_of(float product, const AttentionParams& p, Point point) {
  float score = __fmul_rn(product, p.scale);
  float derivative = 1.0F;
  if constexpr (C.softcap != Softcap::none) {
    derivative = capped_derivative(score, p.softcap);
    score = capped<C.softcap>(score, p.softcap);
  }
  return derivative * Score::template derivative<Position>(score, point(), p.extras);
}

/// natural_score_of() times log2(e). Only for configurations with scale_first.
template <ScoreConfig auto C, class Score, class Position, class Point>
__device__ __forceinline__ float score_of(float product, const AttentionParams& p, float slope, float distance,
                                          Point point) {
  return __fmul_rn(natural_score_of<C, Score, Position>(product, p, slope, distance, point), kLog2E);
}

}  // namespace tessera::cuda
