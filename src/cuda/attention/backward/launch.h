// SPDX-License-Identifier: Apache-2.0
// The backward in two passes over the scores, by rows of queries (dQ) and by keys (dK, dV), behind a kernel that finds
// what rows bring into both. No pass adds to what another block computes, so that every sum has a fixed order.
#pragma once

#include "cuda/implementations.h"
#include "shared/config.h"

namespace tessera::cuda {

/// Whether there are kernels of these products for it, whatever the chip.
Support supports_backward(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
void plan_backward(detail::PlanState& state, Products products);
void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cuda
