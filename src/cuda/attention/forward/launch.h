// SPDX-License-Identifier: Apache-2.0
// What the rows of the table that compute a forward have in common: which problems they take, plan and launch.
#pragma once

#include "cuda/implementations.h"
#include "shared/config.h"

namespace tessera::cuda {

/// Whether there is a kernel of a problem's configuration; wishes may ask for what no kernel can be.
using ConfigSupport = Support (*)(const FwdConfig& config, const Problem& problem, const Target& target,
                                  const Wishes& wishes);

Support supports_forward(const Problem& problem, const Target& target, const Wishes& wishes, Products products,
                         ConfigSupport exists);
void plan_forward(detail::PlanState& state, Products products);
void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cuda
