// SPDX-License-Identifier: Apache-2.0
// Metadata mode `report`: a small kernel that runs before the one that clamps.
#pragma once

#include "cuda/jit/kernel.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cuda {

KernelSource metadata_check_source();
/// Does nothing when no status word is bound.
void launch_metadata_check(const Problem& problem, const Bindings& bindings, const Kernel& kernel, Stream stream);

}  // namespace tessera::cuda
