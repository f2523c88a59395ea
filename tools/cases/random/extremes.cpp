// SPDX-License-Identifier: Apache-2.0
#include "cases/random/extremes.h"

#include <algorithm>
#include <cmath>

namespace tessera::cases {
namespace {

/// Nothing is kept, one draw of 65536 is, most are dropped, all are kept.
constexpr float kDropouts[] = {0.999999F, 0.99999F, 0.99F, 1e-6F};
/// Between a step function and no cap at all, with reciprocals that fp32 has and has not.
constexpr float kCaps[] = {1e-38F, 1e-30F, 1e-3F, 1e4F, 1e6F, 1e9F, 1e30F};
/// Times 1/√d. 0 weighs all keys alike, a negative one turns their order around.
constexpr float kScales[] = {0.0F, -1e-3F, -1.0F, -2.0F, 8.0F};
/// Between queries and keys: distances that fp32 rounds, and that 32 bits do not hold.
constexpr std::int64_t kFar[] = {std::int64_t{1} << 24, std::int64_t{1} << 30, std::int64_t{1} << 33,
                                 std::int64_t{1} << 59};

/// Queries 2^-8 to 2^8 times as long as N(0, 1), now and then another kind.
InputKind random_inputs(RandomNumbers& random) {
  using Kind = InputKind::Kind;
  static constexpr Kind kOthers[] = {Kind::rising, Kind::sink, Kind::outliers, Kind::nan_tail};
  InputKind inputs;
  if (random.chance(0.45)) {
    inputs.kind = Kind::scale;
    inputs.factor = std::ldexp(1.0F, static_cast<int>(random.between(-8, 8)));
  } else if (random.chance(0.25)) {
    inputs.kind = random.pick(kOthers);
  }
  return inputs;
}

/// Whether keys of a row may weigh too little for the type of P.
bool is_steep(const InputKind& inputs) {
  using Kind = InputKind::Kind;
  return inputs.factor > 2.0F || inputs.kind == Kind::rising || inputs.kind == Kind::sink ||
         inputs.kind == Kind::outliers;
}

}  // namespace

Strides random_strides(RandomNumbers& random, bool gpu) {
  static constexpr Strides kGpu[] = {Strides::heads_first, Strides::heads_first, Strides::gaps,
                                     Strides::gaps,        Strides::zero,        Strides::negative};
  static constexpr Strides kCpu[] = {Strides::heads_first, Strides::heads_first, Strides::gaps, Strides::gaps,
                                     Strides::zero,        Strides::negative,    Strides::odd};
  if (!random.chance(0.5)) return Strides::packed;
  return gpu ? random.pick(kGpu) : random.pick(kCpu);
}

void make_extreme(Case& one, RandomNumbers& random, bool gpu) {
  Problem& p = one.problem;
  Values& v = one.values;
  const bool by_prior_lse = p.mass_prior_lse || (p.skip.kind == SkipRule::Kind::mass && !p.skip.own_lse);
  if (p.dropout > 0.0F && random.chance(0.25)) p.dropout = random.pick(kDropouts);
  if (p.softcap > 0.0F && random.chance(0.3)) p.softcap = random.pick(kCaps);
  // Beside a tiny cap a gradient follows the rounding of its score, in any implementation.
  if (p.pass == Pass::backward && p.softcap > 0.0F) p.softcap = std::max(p.softcap, 0.5F);
  bool steep = random.chance(0.05);  // weights may be too small for their type
  if (steep) p.scale = random.pick(kScales) / std::sqrt(static_cast<float>(p.head_dim_qk));
  v.inputs = random_inputs(random);
  // A backward takes exp(score − LSE), and an LSE in fp32 that is large loses what matters: gradients of scores far
  // from 0 are noise, in any implementation, as is a mass by another run's LSE.
  const bool forward = p.pass == Pass::forward;
  if (!forward) v.inputs.factor = std::min(v.inputs.factor, 4.0F);
  // Dot products on the CPU take exponentials that are off by 1e-4 (cpu/simd/pairs-inl.h). Where all keys weigh
  // alike that does not average out in the LSE.
  const bool by_dots = !gpu && p.q_type == DType::bf16 && p.k_type == DType::bf16 && p.v_type == DType::bf16;
  if (by_dots && p.lse) v.inputs.factor = std::max(v.inputs.factor, 1.0F);
  // By another run's LSE a weight may be beyond fp32; so it may be where the backward's list has more than the
  // forward's. All gradients of a source, or under a cap, may be below its normal numbers, which kernels take for 0.
  const bool may_vanish = !forward && (p.kv2 || p.softcap > 0.0F);
  if ((by_prior_lse || p.bwd_list || may_vanish) && is_steep(v.inputs)) v.inputs = {};
  steep = steep || is_steep(v.inputs);
  const bool by_distance = p.alibi || p.score == "relative";
  const bool is_far = random.chance(p.alibi ? 0.2 : 0.03) && (forward ? !by_prior_lse : !by_distance);
  // Far from 0 an LSE in fp32 does not say how many keys a split had, which shows where all weigh alike.
  if (is_far && by_distance) v.inputs = {};
  if (is_far) {
    const std::int64_t far = random.pick(kFar) * (random.chance(0.3) ? -1 : 1);
    v.q_offset.clear();
    for (std::int64_t b = 0; b < p.batch; ++b) v.q_offset.push_back(far + random.between(-20, 60));
    steep = steep || by_distance;
  }
  if (p.sink) v.extreme_sinks = random.chance(0.25);
  // Steep slopes make differences of far distances, which fp32 does not hold, decide which key a row takes.
  if (p.alibi && forward && !by_prior_lse && !is_far) v.extreme_slopes = random.chance(0.25);
  // What a value that is not finite leaves under a weight of 0 is not promised, nor are the gradient of a sink of −∞
  // and masses by another run's LSE where a row is NaN.
  steep = steep || v.extreme_sinks || p.alibi;
  if (p.kv.seqlen == 0 || steep || by_prior_lse || !random.chance(0.06)) return;
  for (std::int64_t keys = random.between(1, 3); keys > 0; --keys) v.non_finite.push_back(random.below(p.kv.seqlen));
  std::sort(v.non_finite.begin(), v.non_finite.end());
  v.non_finite.erase(std::unique(v.non_finite.begin(), v.non_finite.end()), v.non_finite.end());
}

}  // namespace tessera::cases
