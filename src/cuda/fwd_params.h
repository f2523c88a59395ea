// SPDX-License-Identifier: Apache-2.0
// From a problem's bindings to what a forward kernel is given.
#pragma once

#include "shared/params.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Pointers, strides and scalars of a forward. `group`: heads packed into the rows of a tile.
FwdParams fwd_params(const Problem& problem, const Bindings& bindings, int group);

}  // namespace tessera::cuda
