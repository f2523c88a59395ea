// SPDX-License-Identifier: Apache-2.0
// The oracle's operations: a file of this folder defines what compute() does for one of them.
#pragma once

#include "cpu/reference/reference.h"

namespace tessera::reference {

/// Specialised for every operation of the table (src/operations/table.h).
template <Operation operation>
void compute_operation(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, std::uint32_t order,
                       Result& result);

}  // namespace tessera::reference
