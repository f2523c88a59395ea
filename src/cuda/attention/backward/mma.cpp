// SPDX-License-Identifier: Apache-2.0
// The implementation cuda.bwd_mma: the backward for every chip from SM80 on.
#include "cuda/attention/backward/launch.h"

namespace tessera::cuda {
namespace {

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (target.sm < 80) return Support::no("wants SM80 or newer");
  return supports_backward(problem, target, wishes, Products::mma_sync);
}

void plan(detail::PlanState& state) { plan_backward(state, Products::mma_sync); }

}  // namespace

const Implementation kBwdMma = {
    {"cuda.bwd_mma", DeviceType::cuda, Operation::attention, supports, plan, Pass::backward}, run_backward};

}  // namespace tessera::cuda
