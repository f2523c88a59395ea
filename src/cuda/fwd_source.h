// SPDX-License-Identifier: Apache-2.0
// From a configuration to the ten lines that name it to the compiler.
#pragma once

#include <string>
#include <string_view>

#include "cuda/jit/compile.h"
#include "shared/config.h"

namespace tessera::cuda {

/// The device's type of a built-in score or mask callable; nullptr for a name that none has.
const char* score_type(std::string_view name) noexcept;
const char* mask_type(std::string_view name) noexcept;

/// The device's type of all callables of a configuration.
std::string callables_type(const FwdConfig& config, const char* score, const char* mask);

/// `score` and `mask`: the types of its callables, where the configuration has any.
KernelSource fwd_mma_source(const FwdConfig& config, const char* score, const char* mask);

}  // namespace tessera::cuda
