// SPDX-License-Identifier: Apache-2.0
// One element of the scores' gradient.
#pragma once

#include "cuda/attention/backward/non_finite_rows.cuh"
#include "cuda/attention/backward/row_values.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// Returns the gradient of a visible element with respect to q·k, without the softmax scale. `chain`: for a user's
/// score its derivative with respect to scale · q·k, for a softcap alone q·k. `dp`: dO·v; `delta`, `weight`: RowValues
/// of the row.
template <BwdConfig B>
__device__ __forceinline__ float score_gradient(const FwdParams& p, float probability, float chain, float dp,
                                                float delta, float weight, bool kept) {
  float share = B.dropout ? (kept ? dp * p.dropout.scale : 0.0F) : dp;
  if constexpr (B.sink) share *= weight;
  float ds = probability * (share - delta);
  if constexpr (B.differentiates()) {
    // Selected: a user's score may be −∞, whose probability is 0, and have no finite derivative there.
    ds = ds == 0.0F ? 0.0F : ds * chain;
  } else if constexpr (B.softcap != Softcap::none) {
    ds *= capped_derivative(chain * p.scale, p.softcap);
  }
  return ds;
}

/// Returns the factor of dO in dV, without dropout's scale.
template <BwdConfig B>
__device__ __forceinline__ float value_weight(float probability, float weight, bool kept) {
  if (B.dropout && !kept) return probability * 0.0F;  // a NaN stays NaN
  return B.has_weights() ? probability * weight : probability;
}

/// Whether a row that is not finite makes dV of a visible key NaN. If dropout drops the element, dO does not matter.
__device__ __forceinline__ bool makes_value_nan(int non_finite, bool kept) {
  return (non_finite & kNonFiniteQk) != 0 || (non_finite != 0 && kept);
}

/// Returns the factor that turns a score after finish() into a base-2 exponent: 1 with scale_first, whose scores are
/// multiplied by log2(e) already.
template <BwdConfig B>
__device__ __forceinline__ float score_scale(const FwdParams& p) {
  return B.scale_first ? 1.0F : p.scale * kLog2E;
}

/// The probability as a factor in dV (value_weight), and the gradient of the score.
struct ElementGradient {
  float p;
  float ds;
};

/// `score`: after masks, −∞ if hidden; `scale`: score_scale(); `non_finite`: NonFiniteRows::of() of the streamed row of
/// the element: which of its two operands are not finite (0: neither).
template <BwdConfig B>
__device__ __forceinline__ ElementGradient gradient_of(const FwdParams& p, float score, float chain, float dp,
                                                       const RowValue& row, float scale, bool kept, int non_finite) {
  const float probability = ptx::exp2(__fmaf_rn(score, scale, -row.lse));
  ElementGradient g{value_weight<B>(probability, row.weight, kept),
                    score_gradient<B>(p, probability, chain, dp, row.delta, row.weight, kept)};
  if (non_finite != 0) g.ds = kNaN;
  if (makes_value_nan(non_finite, kept)) g.p = kNaN;
  // Selected, not multiplied by 0: V of a hidden key, or dO of a hidden row, may be NaN.
  if (score == -kInfinity || (B.truncates && row.lse == kInfinity)) g.p = g.ds = 0.0F;
  return g;
}

}  // namespace tessera::cuda
