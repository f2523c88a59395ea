// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.bwd_wgmma: the backward for SM90.

#include "cuda/attention/backward/config.h"
#include "cuda/attention/backward/launch.h"

namespace tessera::cuda {
namespace {

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (const Support s = supports_features(problem); !s) return s;
  if (target.sm != 90) return Support::no("wants SM90");
  if (wishes.implementation.empty() && prefers_mma(problem, target)) {
    return Support::no("leaves lists whose blocks cut tiles of 64 rows to cuda.bwd_mma");
  }
  return supports_backward(problem, target, wishes, Products::wgmma);
}

void plan(detail::PlanState& state) { plan_backward(state, Products::wgmma); }

}  // namespace

const Implementation kBwdWgmma = {
    {"cuda.bwd_wgmma", DeviceType::cuda, Operation::attention, supports, plan, Pass::backward}, run_backward};

}  // namespace tessera::cuda
