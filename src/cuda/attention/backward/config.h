// SPDX-License-Identifier: Apache-2.0
// Which kernels a backward runs.
#pragma once

#include "shared/backward.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The target's best configuration of a pass.
BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of);
RowValuesConfig row_values_config(const Problem& problem);

}  // namespace tessera::cuda
