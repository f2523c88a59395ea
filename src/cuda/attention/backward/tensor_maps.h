// SPDX-License-Identifier: Apache-2.0
// TMA tensor maps of the tensors that the backward reads.
#pragma once

#include "shared/backward.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Makes the maps of a pass. Throws Error{unsupported} if the driver, or the strides of a tensor, do not allow one.
BwdTensorMaps tensor_maps(const BwdConfig& config, const Problem& problem, const BwdParams& params);

}  // namespace tessera::cuda
