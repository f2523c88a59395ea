// SPDX-License-Identifier: Apache-2.0
// Tensor maps of what the backward reads, for TMA.
#pragma once

#include "shared/backward.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Maps for a pass. Throws Error{unsupported} where the driver or the strides of a tensor allow none.
BwdTensorMaps tensor_maps(const BwdConfig& config, const Problem& problem, const BwdParams& params);

}  // namespace tessera::cuda
