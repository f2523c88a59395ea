// SPDX-License-Identifier: Apache-2.0
// The oracle's linear attention: the recurrence, one element of the state after another.
#pragma once

#include "cpu/reference.h"

namespace tessera::reference {

void linear_decode(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order,
                   Result& result);
/// Either pass.
void linear_chunk(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order,
                  Result& result);

}  // namespace tessera::reference
