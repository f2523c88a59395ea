// SPDX-License-Identifier: Apache-2.0
// Floating-point tensors as fp32 and back, element by element: for filling inputs and comparing results, not for speed.
#pragma once

#include <cstdint>
#include <vector>

#include "base/half.h"
#include "tessera/tensor.h"

namespace tessera::files {

using detail::from_bf16;
using detail::from_fp16;
/// Round to nearest even; too large becomes infinity, NaN stays NaN.
std::uint16_t to_fp16(float value) noexcept;
std::uint16_t to_bf16(float value) noexcept;

/// The elements of a contiguous tensor of a floating type or int8. Throws Error{invalid_argument} on another dtype.
std::vector<float> to_floats(const Tensor& tensor);
/// Stores into element `index` of a contiguous tensor of such a type but fp64.
void store_float(const Tensor& tensor, std::int64_t index, float value);

}  // namespace tessera::files
