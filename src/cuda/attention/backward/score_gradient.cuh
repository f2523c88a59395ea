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

/// The gradient with respect to q·k of a visible element, without the softmax scale. `chain` is what the chain rule
/// needs: of a user's score its derivative by scale · q·k, of a softcap alone q·k itself. `dp`: dO·v; `delta`,
/// `weight`: of the row (RowValues).
template <BwdConfig B>
__device__ __forceinline__ float score_gradient(const FwdParams& p, float probability, float chain, float dp,
                                                float delta, float weight, bool kept) {
  float share = B.dropout ? (kept ? dp * p.dropout.scale : 0.0F) : dp;
  if constexpr (B.sink) share *= weight;
  float ds = probability * (share - delta);
  if constexpr (B.differentiates()) {
    // Selected: a user's score may be −∞ by value, which weighs 0, and have no finite derivative there.
    ds = ds == 0.0F ? 0.0F : ds * chain;
  } else if constexpr (B.softcap != Softcap::none) {
    ds *= capped_derivative(chain * p.scale, p.softcap);
  }
  return ds;
}

/// What dV takes of a probability, but for dropout's scale.
template <BwdConfig B>
__device__ __forceinline__ float value_weight(float probability, float weight, bool kept) {
  if (B.dropout && !kept) return probability * 0.0F;  // a NaN stays one
  return B.has_weights() ? probability * weight : probability;
}

/// Whether dV of a visible key becomes NaN by the row: dO of a key that dropout drops is not looked at.
__device__ __forceinline__ bool makes_value_nan(int non_finite, bool kept) {
  return (non_finite & kNonFiniteQk) != 0 || (non_finite != 0 && kept);
}

/// The factor that takes a score after finish() to units of log2(e): 1 if the score is in these already (scale_first).
template <BwdConfig B>
__device__ __forceinline__ float score_scale(const FwdParams& p) {
  return B.scale_first ? 1.0F : p.scale * kLog2E;
}

/// A probability as dV takes it and the gradient of the score that it came from.
struct ElementGradient {
  float p;
  float ds;
};

/// `score`: after masks, −∞ where hidden; `scale`: score_scale(); `non_finite`: NonFiniteRows::of the element's row
/// that streams, that is which of its two operands are not finite (0: neither).
template <BwdConfig B>
__device__ __forceinline__ ElementGradient gradient_of(const FwdParams& p, float score, float chain, float dp,
                                                       const RowValue& row, float scale, bool kept, int non_finite) {
  const float probability = ptx::exp2(__fmaf_rn(score, scale, -row.lse));
  ElementGradient g{value_weight<B>(probability, row.weight, kept),
                    score_gradient<B>(p, probability, chain, dp, row.delta, row.weight, kept)};
  if (non_finite != 0) g.ds = kNaN;
  if (makes_value_nan(non_finite, kept)) g.p = kNaN;
  // Selected and not multiplied: a hidden key's V, or a hidden row's dO, may be NaN.
  if (score == -kInfinity || (B.truncates && row.lse == kInfinity)) g.p = g.ds = 0.0F;
  return g;
}

}  // namespace tessera::cuda
