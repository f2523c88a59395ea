// SPDX-License-Identifier: Apache-2.0
// The backward, behind a kernel that finds what rows bring into it: two passes over the scores, by rows of queries (dQ)
// and by keys (dK, dV), whose sums have a fixed order; or one pass by keys that adds dQ to sums in memory, in no fixed
// order, and a kernel that stores them.
#pragma once

#include "cuda/implementations.h"
#include "shared/config.h"

namespace tessera::cuda {

/// Whether any backward here has what the problem asks for.
Support supports_features(const Problem& problem);
/// Whether there are kernels of these products for it, whatever the chip.
Support supports_backward(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
void plan_backward(detail::PlanState& state, Products products);
void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cuda
