// SPDX-License-Identifier: Apache-2.0
// What a problem may use an element type for; the table is in tensor.cpp.
#pragma once

#include <string>

#include "tessera/tensor.h"

namespace tessera::detail {

/// q, k and v may be of it.
bool is_operand(DType dtype) noexcept;
/// Outputs may be of it too: numbers that need no scales.
bool is_result(DType dtype) noexcept;
/// 8 bits, which stand for a number only with a descale.
inline bool is_quantised(DType dtype) noexcept { return is_operand(dtype) && !is_result(dtype); }
/// "fp32, fp16 or bf16", for errors.
std::string operand_types();
std::string result_types();

}  // namespace tessera::detail
