// SPDX-License-Identifier: Apache-2.0
// The table of operations.
#pragma once

#include <array>

#include "problem/operation.h"

namespace tessera::detail {

extern const OperationRules kAttention;     // attention.cpp, with attention_check.cpp and attention_tensors.cpp
extern const OperationRules kCombine;       // combine.cpp
extern const OperationRules kKvAppend;      // kv_append.cpp
extern const OperationRules kLinearDecode;  // linear_decode.cpp
extern const OperationRules kLinearChunk;   // linear_chunk.cpp
extern const OperationRules kNsaPool;       // nsa_pool.cpp
extern const OperationRules kNsaSelect;     // nsa_select.cpp
extern const OperationRules kNsaGate;       // nsa_gate.cpp
extern const OperationRules kQuantize;      // quantize.cpp

/// In the order of enum Operation.
inline constexpr std::array kOperations = {&kAttention, &kCombine,   &kKvAppend, &kLinearDecode, &kLinearChunk,
                                           &kNsaPool,   &kNsaSelect, &kNsaGate,  &kQuantize};

}  // namespace tessera::detail
