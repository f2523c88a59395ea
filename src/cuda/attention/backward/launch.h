// SPDX-License-Identifier: Apache-2.0
// The backward. A first kernel computes the row values (LSE, delta). Then either two passes follow, a row pass (dQ) and
// a key pass (dK, dV), whose sums have a fixed order; or one pass follows, a key pass that also adds dQ to fp32 sums in
// memory (in a fixed order only with BwdConfig::ordered), and a last kernel that rounds and stores these.
#pragma once

#include "cuda/implementations.h"
#include "shared/config.h"

namespace tessera::cuda {

/// Whether the backward kernels support what the problem asks for.
Support supports_features(const Problem& problem);
/// Whether there are kernels with these products for the problem that fit the target's memory. Callers check its SM.
Support supports_backward(const Problem& problem, const Target& target, const Wishes& wishes, Products products);
void plan_backward(detail::PlanState& state, Products products);
void run_backward(const detail::PlanState& state, const Bindings& bindings, const Resources& resources);

}  // namespace tessera::cuda
