// SPDX-License-Identifier: Apache-2.0
// 64-bit arithmetic that detects overflow.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace tessera::detail {

/// Largest single size, block or length accepted anywhere (2^48): sums of a few of them cannot overflow.
inline constexpr std::int64_t kMaxSize = std::int64_t{1} << 48;
/// Largest magnitude of a position, a window offset or an offset binding (2^60): differences of two cannot overflow.
inline constexpr std::int64_t kMaxPosition = std::int64_t{1} << 60;

inline std::optional<std::int64_t> checked_multiply(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

inline std::optional<std::int64_t> checked_add(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

/// Product of non-negative sizes with zeros counted as ones, so that strides of empty tensors fit too.
inline std::optional<std::int64_t> checked_extent(const std::int64_t* sizes, int count, std::int64_t element) noexcept {
  std::int64_t out = element;
  for (int i = 0; i < count; ++i) {
    const std::int64_t size = sizes[i] > 0 ? sizes[i] : 1;
    if (__builtin_mul_overflow(out, size, &out)) return std::nullopt;
  }
  return out;
}

inline std::optional<std::int64_t> checked_extent(std::initializer_list<std::int64_t> sizes,
                                                  std::int64_t element) noexcept {
  return checked_extent(sizes.begin(), static_cast<int>(sizes.size()), element);
}

/// ceil(a / b) for a ≥ 0, b ≥ 1 without forming a + b.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace tessera::detail
