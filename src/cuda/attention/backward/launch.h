// SPDX-License-Identifier: Apache-2.0
// The backward. A first kernel computes the row values (LSE, delta). Two passes follow, by rows (dQ) and by keys (dK,
// dV), whose sums have a fixed order; or one pass by keys, which adds dQ to fp32 sums in memory (in a fixed order only
// with BwdConfig::ordered), and a kernel that rounds and stores these.
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
