// SPDX-License-Identifier: Apache-2.0
// Converts single fp16 and bf16 numbers to fp32, for host functions, inputs and results. Tiles have their own kernels
// for this, and the oracle its own conversions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::detail {

inline float from_bf16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

inline float from_fp16(std::uint16_t bits) noexcept {
  const int exponent = bits >> 10U & 31;
  const int fraction = bits & 1023;
  float magnitude = 0.0F;
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

}  // namespace tessera::detail
