// SPDX-License-Identifier: Apache-2.0
// What the implementations of the forward share: which problems they support, their plan and their launch.
#pragma once

#include "cuda/implementations.h"
#include "shared/config.h"

namespace tessera::cuda {

/// Whether a kernel supports a configuration; wishes may ask for one that no kernel supports.
using ConfigSupport = Support (*)(const FwdConfig& config, const Problem& problem, const Target& target,
                                  const Wishes& wishes);

Support supports_forward(const Problem& problem, const Target& target, const Wishes& wishes, Products products,
                         ConfigSupport exists);
void plan_forward(detail::PlanState& state, Products products);
void run_forward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cuda
