// SPDX-License-Identifier: Apache-2.0
// The judgement of what quantize writes.
#pragma once

#include <string>

#include "cpu/reference/reference.h"
#include "tessera/executor.h"

namespace tessera::cases {

/// "" where every element is the nearest of its type to a number within `allowed` of the oracle's; else which is not.
std::string compare_quantized(const Bindings& got, const reference::Result& oracle, double allowed);

}  // namespace tessera::cases
