// SPDX-License-Identifier: Apache-2.0
// Generates the sources of the backward kernels from their configurations.
#pragma once

#include "cuda/attention/scores/callable_source.h"
#include "cuda/jit/compile.h"
#include "shared/backward.h"

namespace tessera::cuda {

KernelSource bwd_source(const BwdConfig& config, const CallableSources& callables);
KernelSource row_values_source(const RowValuesConfig& config);
KernelSource query_sums_source(const QuerySumsConfig& config);
/// The kernel that converts a list to TileBits; all backwards with lists share it.
KernelSource mark_tiles_source();
/// The kernel that chooses the tiles of keys that have parts (KeyParts).
KernelSource split_keys_source();
/// The kernel that adds up dsink; all backwards with sinks share it.
KernelSource sum_sinks_source();

}  // namespace tessera::cuda
