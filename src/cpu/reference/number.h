// SPDX-License-Identifier: Apache-2.0
// Reads elements of tensors as numbers, and rounds to narrow types. The fast path has its own code for this.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "tessera/tensor.h"

namespace tessera::reference {

/// What a floating type can hold.
struct Format {
  int digits;  // of the fraction
  int exponent_bits;
  double largest;  // finite
  /// The exponent of the smallest normal number.
  [[nodiscard]] int least_exponent() const noexcept { return 2 - (1 << (exponent_bits - 1)); }
};
inline Format format_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp64:
      return {52, 11, std::numeric_limits<double>::max()};
    case DType::fp16:
      return {10, 5, 65504.0};
    case DType::bf16:
      return {7, 8, 0x1.FEp127};
    case DType::e4m3:
      return {3, 4, 448.0};
    case DType::e5m2:
      return {2, 5, 57344.0};
    default:
      return {23, 8, std::numeric_limits<float>::max()};
  }
}

/// To the nearest bf16, ties to even; NaN stays NaN.
inline float round_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return value;
  return std::bit_cast<float>((bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U);
}

/// To the nearest fp16, ties to even; beyond 65519 infinite; NaN stays NaN.
inline float round_to_fp16(float value) noexcept {
  const float magnitude = std::fabs(value);
  if (!(magnitude < 65520.0F)) {
    return magnitude != magnitude ? value : std::copysign(std::numeric_limits<float>::infinity(), value);
  }
  if (magnitude < 0x1p-14F) {
    // Subnormal: an fp32 in [0.5, 1) has the same spacing, 2^-24.
    const float rounded = (magnitude + 0.75F) - 0.75F;
    return std::copysign(rounded, value);
  }
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>((bits + 0xfffU + ((bits >> 13) & 1U)) & 0xffffe000U);
}

inline float round_to(DType dtype, float value) noexcept {
  if (dtype == DType::bf16) return round_to_bf16(value);
  if (dtype == DType::fp16) return round_to_fp16(value);
  return value;
}

/// The size of a step of O's residual: 1/254 of the spacing of `dtype` at `rounded`.
inline double residual_step(DType dtype, double rounded) noexcept {
  const int least = dtype == DType::bf16 ? -119 : -14;
  const int digits = dtype == DType::bf16 ? 7 : 10;
  const int exponent = rounded == 0 || !std::isfinite(rounded) ? least : std::max(std::ilogb(rounded), least);
  return std::ldexp(1.0, exponent - digits) / 254;
}

/// The residual of `exact` as a byte: what rounding it loses; 0 if the rounded number is not finite.
inline std::int8_t residual_of(DType dtype, double exact) noexcept {
  const double rounded = round_to(dtype, static_cast<float>(exact));
  if (!std::isfinite(rounded)) return 0;
  return static_cast<std::int8_t>(std::lrint((exact - rounded) / residual_step(dtype, rounded)));
}

inline double with_residual(DType dtype, double rounded, double residual) noexcept {
  return rounded + residual * residual_step(dtype, rounded);
}

/// Rounds as an implementation of narrow types would; the oracle does not round.
struct Rounder {
  bool oracle;
  [[nodiscard]] double operator()(DType dtype, double value) const {
    return oracle ? value : static_cast<double>(round_to(dtype, static_cast<float>(value)));
  }
};

inline float fp16_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU;
  const std::uint32_t mantissa = half & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t biased = exponent == 31 ? 255U : exponent + 112U;
  return std::bit_cast<float>(sign | (biased << 23) | (mantissa << 13));
}

inline std::uint16_t float_to_fp16(float value) noexcept {
  const float rounded = round_to_fp16(value);
  const auto bits = std::bit_cast<std::uint32_t>(rounded);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  if (rounded != rounded) return static_cast<std::uint16_t>(sign | 0x7e00U);
  const float magnitude = std::fabs(rounded);
  if (magnitude >= 65536.0F) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (magnitude < 0x1p-14F) return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(magnitude * 0x1p24F));
  return static_cast<std::uint16_t>(sign | (((bits & 0x7fffffffU) >> 13) - (112U << 10)));
}

/// A byte of e4m3 or e5m2 as a number: sign · (1.fraction or 0.fraction) · 2^exponent. The highest exponent of e5m2
/// holds infinity and NaN as fp16's does, in e4m3 only a fraction of all ones is NaN.
inline double float8_to_double(DType dtype, std::uint8_t byte) noexcept {
  const Format format = format_of(dtype);
  const int ones = (1 << format.digits) - 1;
  const int fraction = byte & ones;
  const int exponent = (byte & 0x7f) >> format.digits;
  const double sign = byte < 0x80 ? 1 : -1;
  if (exponent == (1 << format.exponent_bits) - 1 && (dtype == DType::e5m2 || fraction == ones)) {
    return sign * (dtype == DType::e5m2 && fraction == 0 ? std::numeric_limits<double>::infinity()
                                                         : std::numeric_limits<double>::quiet_NaN());
  }
  const double leading = exponent == 0 ? 0 : ones + 1;
  return sign * std::ldexp(leading + fraction, format.least_exponent() - format.digits + std::max(exponent - 1, 0));
}

/// Rounds a finite number to e4m3, e5m2 or int8, ties to even, as if the type had no largest number.
inline double nearest_quantised(DType dtype, double value) noexcept {
  if (dtype == DType::int8) return std::nearbyint(value);
  const Format format = format_of(dtype);
  const int exponent = value == 0 ? format.least_exponent() : std::max(std::ilogb(value), format.least_exponent());
  const double spacing = std::ldexp(1.0, exponent - format.digits);
  return std::nearbyint(value / spacing) * spacing;
}

inline std::uint8_t double_to_float8(DType dtype, double value) noexcept {
  const Format format = format_of(dtype);
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const int highest = ((1 << format.exponent_bits) - 1) << format.digits;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | (dtype == DType::e4m3 ? 0x7f : highest | 2));
  const double rounded = std::isinf(value) ? value : nearest_quantised(dtype, std::fabs(value));
  if (!(std::fabs(rounded) <= format.largest)) {
    return static_cast<std::uint8_t>(sign | (dtype == DType::e4m3 ? 0x7f : highest));
  }
  for (int byte = 0; byte < 0x80; ++byte) {
    if (float8_to_double(dtype, static_cast<std::uint8_t>(byte)) == rounded) {
      return static_cast<std::uint8_t>(sign | byte);
    }
  }
  return sign;
}

/// Element at `offset` (in elements from the first) of a tensor of any floating or integer type.
inline double read(const Tensor& tensor, std::int64_t offset) noexcept {
  const std::byte* at = tensor.bytes() + offset * static_cast<std::int64_t>(size_of(tensor.dtype));
  const auto as = [at]<class T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (tensor.dtype) {
    case DType::fp64:
      return as(double{});
    case DType::fp32:
      return as(float{});
    case DType::fp16:
      return fp16_to_float(as(std::uint16_t{}));
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(as(std::uint16_t{})) << 16);
    case DType::int8:
      return as(std::int8_t{});
    case DType::uint8:
      return as(std::uint8_t{});
    case DType::int32:
      return as(std::int32_t{});
    case DType::uint32:
      return as(std::uint32_t{});
    case DType::int64:
      return static_cast<double>(as(std::int64_t{}));
    case DType::uint64:
      return static_cast<double>(as(std::uint64_t{}));
    case DType::e4m3:
    case DType::e5m2:
      return float8_to_double(tensor.dtype, as(std::uint8_t{}));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// Rounds to the tensor's type and stores. Integers are exact.
inline void write(const Tensor& tensor, std::int64_t offset, double value) noexcept {
  std::byte* at = tensor.bytes() + offset * static_cast<std::int64_t>(size_of(tensor.dtype));
  const auto put = [at](auto stored) { std::memcpy(at, &stored, sizeof stored); };
  switch (tensor.dtype) {
    case DType::fp64:
      return put(value);
    case DType::fp32:
      return put(static_cast<float>(value));
    case DType::fp16:
      return put(float_to_fp16(static_cast<float>(value)));
    case DType::bf16:
      return put(
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(round_to_bf16(static_cast<float>(value))) >> 16));
    case DType::int8:
      return put(static_cast<std::int8_t>(std::nearbyint(value)));
    case DType::uint8:
      return put(static_cast<std::uint8_t>(value));
    case DType::int32:
      return put(static_cast<std::int32_t>(value));
    case DType::uint32:
      return put(static_cast<std::uint32_t>(value));
    case DType::int64:
      return put(static_cast<std::int64_t>(value));
    case DType::uint64:
      return put(static_cast<std::uint64_t>(value));
    case DType::e4m3:
    case DType::e5m2:
      return put(double_to_float8(tensor.dtype, value));
  }
}

/// to[i] += factor · from[i]. The oracle spends most of its time in this loop, so it is vectorised.
template <class Real>
void add_scaled(Real* to, Real factor, const Real* from, std::size_t count) noexcept {
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/// Calls visit(index in row-major order, offset in elements) for every element.
template <class Visit>
void for_each_element(const Tensor& tensor, Visit visit) {
  std::int64_t count = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[static_cast<std::size_t>(axis)];
  std::array<std::int64_t, Tensor::kMaxRank> at{};
  std::int64_t offset = 0;
  for (std::int64_t index = 0; index < count; ++index) {
    visit(index, offset);
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      offset += tensor.strides[a];
      if (++at[a] < tensor.shape[a]) break;
      offset -= tensor.strides[a] * tensor.shape[a];
      at[a] = 0;
    }
  }
}

}  // namespace tessera::reference
