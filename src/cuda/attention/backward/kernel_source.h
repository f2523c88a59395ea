// SPDX-License-Identifier: Apache-2.0
// From the configurations of a backward's kernels to the lines that name them to the compiler.
#pragma once

#include "cuda/attention/scores/callable_source.h"
#include "cuda/jit/compile.h"
#include "shared/backward.h"

namespace tessera::cuda {

KernelSource bwd_source(const BwdConfig& config, const CallableSources& callables);
KernelSource row_values_source(const RowValuesConfig& config);
KernelSource query_sums_source(const QuerySumsConfig& config);
/// The kernel that finds out which tiles a list leaves; all backwards with lists share it.
KernelSource mark_tiles_source();
/// Which tiles of keys have parts.
KernelSource split_keys_source();
/// The kernel that adds up dsink; all backwards with sinks share it.
KernelSource sum_sinks_source();

}  // namespace tessera::cuda
