// SPDX-License-Identifier: Apache-2.0
// From a configuration to the ten lines that name it to the compiler.
#pragma once

#include <string>

#include "cuda/attention/scores/callable_source.h"
#include "cuda/jit/compile.h"
#include "shared/config.h"

namespace tessera::cuda {

/// The line that defines `config`.
std::string configuration_line(const FwdConfig& config);

/// What people call it, behind the kernel's own name: " bf16 d=64:64 tile=128x64 …".
std::string configuration_words(const FwdConfig& config, const CallableSources& callables);

/// `callables`: those of the problem that the configuration is for.
KernelSource fwd_source(const FwdConfig& config, const CallableSources& callables);

}  // namespace tessera::cuda
