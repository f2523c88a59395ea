// SPDX-License-Identifier: Apache-2.0
// From an expression to the order in which kernels compute its steps on a tile, and where values lie meanwhile.
#pragma once

#include <string>

#include "cpu/simd/expression.h"
#include "problem/registered_callables.h"

namespace tessera::cpu {

/// For tiles whose lanes are queries (the forward's) or keys (the backward's). Not usable where more values are alive
/// at once than kExpressionSlots.
void make_lane_program(const detail::Expression& expression, bool inner_is_query, LaneProgram& program);

/// A line for each program that has no usable lane program, for explain(): it is called for each element then, which is
/// many times slower.
std::string element_calls(const detail::RegisteredCallables& callables);

}  // namespace tessera::cpu
