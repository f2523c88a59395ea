// SPDX-License-Identifier: Apache-2.0
// Tensor maps of queries, keys and values, for TMA of SM90 and newer.
#pragma once

#include "shared/config.h"
#include "shared/params.h"
#include "tessera/problem.h"

namespace tessera::cuda {

/// Rows of a source that a tile takes together and that lie together: as far as pages and runs of a list do.
int box_rows(const FwdConfig& config, const KvSource& source);

/// Maps of the tensors in `params`, whose sources have their box_rows. Throws Error{unsupported} where the driver or
/// the strides of keys and values allow none; queries whose strides allow none are copied otherwise.
TensorMaps tensor_maps(const FwdConfig& config, const Problem& problem, const FwdParams& params, int packed_heads);

}  // namespace tessera::cuda
