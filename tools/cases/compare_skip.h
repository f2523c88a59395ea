// SPDX-License-Identifier: Apache-2.0
// Whether a step has moved a skip state on rightly.
#pragma once

#include <string>

#include "cpu/reference/reference.h"

namespace tessera::cases {

/// "" or what is wrong with the list and the memory that a step has left. `allowed`: of a mass, or of octaves for the
/// rule threshold.
std::string compare_skip(const Problem& problem, const Bindings& got, const reference::Result& oracle, double allowed);

}  // namespace tessera::cases
