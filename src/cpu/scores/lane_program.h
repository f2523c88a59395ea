// SPDX-License-Identifier: Apache-2.0
// Compiles an expression: the order in which kernels compute its steps on a tile, and the slots of the values.
#pragma once

#include <string>

#include "cpu/simd/expression.h"
#include "problem/registered_callables.h"

namespace tessera::cpu {

/// For tiles whose lanes are queries (in the forward) or keys (in the backward). The program is not usable if more than
/// kExpressionSlots values are alive at once.
void make_lane_program(const detail::Expression& expression, bool inner_is_query, LaneProgram& program);

/// Returns a line for explain() for each callable whose lane program is not usable. It is called for each element,
/// which is many times slower.
std::string element_calls(const detail::RegisteredCallables& callables);

}  // namespace tessera::cpu
