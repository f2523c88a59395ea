// SPDX-License-Identifier: Apache-2.0
// Which kernels a backward runs.
#pragma once

#include "shared/backward.h"
#include "tessera/plan.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// The target's best configuration of a pass.
BwdConfig bwd_config(const Problem& problem, const Target& target, Products products, Gradients of);
/// Whether the pass by keys finds dQ too, which is faster; its sums have a fixed order only where the problem wants it.
bool finds_all(const Problem& problem, const Target& target, Products products);
/// `sums`: of dQ in memory, for a pass that finds all gradients.
RowValuesConfig row_values_config(const Problem& problem, bool sums);

}  // namespace tessera::cuda
