// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/simd/kernels.h"
#include "tessera/executor.h"

namespace tessera::cpu {

/// Does a step of one head of one sequence, whose recent tokens wait in a ring beside the state.
void step_with_ring(const Problem& problem, const Bindings& bindings, const Kernels& kernels, std::int64_t batch,
                    std::int64_t head);

}  // namespace tessera::cpu
