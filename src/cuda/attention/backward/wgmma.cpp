// SPDX-License-Identifier: Apache-2.0
// The row cuda.bwd_wgmma of the table: the backward for SM90.
#include <algorithm>

#include "cuda/attention/backward/launch.h"

namespace tessera::cuda {
namespace {

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  if (const Support s = supports_features(problem); !s) return s;
  if (target.sm != 90) return Support::no("wants SM90");
  if (std::max(problem.head_dim_qk, problem.head_dim_v) > 128) return Support::no("wants head dims of at most 128");
  return supports_backward(problem, target, wishes, Products::wgmma);
}

void plan(detail::PlanState& state) { plan_backward(state, Products::wgmma); }

}  // namespace

const Implementation kBwdWgmma = {
    {"cuda.bwd_wgmma", DeviceType::cuda, Operation::attention, supports, plan, Pass::backward}, run_backward};

}  // namespace tessera::cuda
