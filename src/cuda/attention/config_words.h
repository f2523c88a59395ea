// SPDX-License-Identifier: Apache-2.0
// What people call a forward's configuration, behind the name of the kernel that has it.
#pragma once

#include <string>

#include "shared/config.h"

namespace tessera::cuda {

/// " bf16 d=64:64 tile=128x64 stages=2 source=paged …", without the user's functions, which have names of their own.
std::string words_of(const FwdConfig& config);

}  // namespace tessera::cuda
