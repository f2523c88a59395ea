// SPDX-License-Identifier: Apache-2.0
// Launches the kernel that merges partial results, for the operation combine and after a forward with splits.
#pragma once

#include <cstdint>

#include "cuda/implementations.h"
#include "shared/combine.h"

namespace tessera::cuda {

KernelSource source_of(const CombineConfig& config);

/// `batch`: number of sequences; `rows`: of the longest.
void launch_combine(const Kernel& kernel, const CombineParams& params, std::int64_t batch, std::int64_t rows,
                    Stream stream);

}  // namespace tessera::cuda
