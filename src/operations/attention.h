// SPDX-License-Identifier: Apache-2.0
// The parts of attention's rules, which fill more than one file.
#pragma once

#include "problem/operation.h"

namespace tessera::detail {

void check_attention(const Problem& problem);  // attention_check.cpp
Support attention_is_defined(const Problem& problem);
void attention_tensors(RuleWriter& rules, const Problem& problem);  // attention_tensors.cpp
void check_attention_values(const Problem& problem, const Bindings& bindings);

}  // namespace tessera::detail
