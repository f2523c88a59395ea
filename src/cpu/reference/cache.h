// SPDX-License-Identifier: Apache-2.0
// The oracle's operations around attention: merging of partial results and appending to a KV cache.
#pragma once

#include "cpu/reference/reference.h"

namespace tessera::reference {

void combine(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, Result& result);
void append(const Problem& problem, const Bindings& bindings, Arithmetic arithmetic, Result& result);

}  // namespace tessera::reference
