// SPDX-License-Identifier: Apache-2.0
// The words for a forward's configuration that follow the name of its kernel.
#pragma once

#include <string>

#include "shared/config.h"

namespace tessera::cuda {

/// " bf16 d=64:64 tile=128x64 stages=2 source=paged …", without the user's functions, which have names of their own.
std::string words_of(const FwdConfig& config);

}  // namespace tessera::cuda
