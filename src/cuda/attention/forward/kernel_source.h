// SPDX-License-Identifier: Apache-2.0
// From a configuration to the ten lines that name it to the compiler.
#pragma once

#include "cuda/attention/scores/callable_source.h"
#include "cuda/jit/compile.h"
#include "shared/config.h"

namespace tessera::cuda {

/// `callables`: those of the problem that the configuration is for.
KernelSource fwd_source(const FwdConfig& config, const CallableSources& callables);

}  // namespace tessera::cuda
