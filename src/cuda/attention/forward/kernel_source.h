// SPDX-License-Identifier: Apache-2.0
// Generates the source of a forward kernel from its configuration.
#pragma once

#include "cuda/attention/scores/callable_source.h"
#include "cuda/jit/compile.h"
#include "shared/config.h"

namespace tessera::cuda {

/// `callables`: those of the configuration's problem.
KernelSource fwd_source(const FwdConfig& config, const CallableSources& callables);

}  // namespace tessera::cuda
