// SPDX-License-Identifier: Apache-2.0
// What a problem may use an element type for; the table is in tensor.cpp.
#pragma once

#include <string>

#include "tessera/tensor.h"

namespace tessera::detail {

/// Whether q, k and v may have this type.
bool is_operand(DType dtype) noexcept;
/// Whether outputs may have it, too: a type of numbers that need no descales.
bool is_result(DType dtype) noexcept;
/// Whether it is an 8-bit type, which represents numbers only together with a descale.
inline bool is_quantised(DType dtype) noexcept { return is_operand(dtype) && !is_result(dtype); }
/// "fp32, fp16 or bf16", for errors.
std::string operand_types();
std::string result_types();

}  // namespace tessera::detail
