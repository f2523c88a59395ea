// SPDX-License-Identifier: Apache-2.0
// The bf16 kernels compute exponents and round by integer arithmetic on the bits of fp32 numbers. This keeps a NaN
// whose low 16 bits are 0, like those of bf16 inputs and of arithmetic itself, but may turn any other NaN into a
// number. So NaN that comes from outside in fp32 (an LSE, a slope, what a callable returns) is replaced by the default
// NaN when it is read.
#pragma once

#include <limits>

namespace tessera::cpu {

inline float with_default_nan(float value) noexcept {
  return value == value ? value : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace tessera::cpu
