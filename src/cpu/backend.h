// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "plan/backend.h"

namespace tessera::cpu {

const detail::Backend& backend() noexcept;

}  // namespace tessera::cpu
