// SPDX-License-Identifier: Apache-2.0
// Converts single e4m3 and e5m2 numbers (OCP OFP8) to and from fp32. Rounding is to nearest, ties to even; what is too
// large becomes NaN in e4m3, which has no infinity, and infinity in e5m2. The oracle has its own conversions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::detail {

/// Largest finite numbers.
inline constexpr float kLargestE4m3 = 448.0F;
inline constexpr float kLargestE5m2 = 57344.0F;

inline float from_e4m3(std::uint8_t bits) noexcept {
  const int exponent = bits >> 3U & 15;
  const int fraction = bits & 7;
  float magnitude = 0.0F;
  if (exponent == 15 && fraction == 7) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -9);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 8), exponent - 10);
  }
  return (bits & 0x80U) != 0 ? -magnitude : magnitude;
}

inline float from_e5m2(std::uint8_t bits) noexcept {
  const int exponent = bits >> 2U & 31;
  const int fraction = bits & 3;
  float magnitude = 0.0F;
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -16);
  } else {
    magnitude = std::ldexp(static_cast<float>(fraction + 4), exponent - 17);
  }
  return (bits & 0x80U) != 0 ? -magnitude : magnitude;
}

/// Rounds a magnitude, given as fp32 bits, to a format with `digits` mantissa bits and exponent bias `bias`. The result
/// is not limited: it is as if the format had larger exponents, too.
template <unsigned digits, unsigned bias>
constexpr std::uint32_t nearest_bits(std::uint32_t magnitude) noexcept {
  constexpr unsigned kDropped = 23 - digits;
  constexpr std::uint32_t kRebias = (127 - bias) << 23U;
  if (magnitude < kRebias + (1U << 23U)) {
    // Subnormal: the last bit of kAligned stands for the format's smallest number, so that the addition rounds to it.
    constexpr float kAligned = std::bit_cast<float>((127 + 24 - bias - digits) << 23U) * 1.5F;
    return std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kAligned) -
           std::bit_cast<std::uint32_t>(kAligned);
  }
  const std::uint32_t odd = magnitude >> kDropped & 1U;
  return (magnitude - kRebias + ((1U << (kDropped - 1)) - 1U) + odd) >> kDropped;
}

inline std::uint8_t to_e4m3(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = nearest_bits<3, 7>(bits & 0x7FFFFFFFU);
  return static_cast<std::uint8_t>((bits >> 24U & 0x80U) | (nearest > 0x7EU ? 0x7FU : nearest));
}

inline std::uint8_t to_e5m2(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = nearest_bits<2, 15>(bits & 0x7FFFFFFFU);
  const std::uint32_t large = std::isnan(value) ? 0x7EU : 0x7CU;
  return static_cast<std::uint8_t>((bits >> 24U & 0x80U) | (nearest > 0x7BU ? large : nearest));
}

}  // namespace tessera::detail
