// SPDX-License-Identifier: Apache-2.0
#include "files/convert.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/float8.h"
#include "tessera/error.h"

namespace tessera::files {

std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16U | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U);
}

std::uint16_t to_fp16(float value) noexcept {
  const auto sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16U & 0x8000U);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (magnitude == 0.0F) return sign;
  if (magnitude >= 65520.0F) return static_cast<std::uint16_t>(sign | 0x7C00U);  // half way past the largest, 65504
  int exponent = 0;
  std::frexp(magnitude, &exponent);               // magnitude = f · 2^exponent, f in [0.5, 1)
  const int unit = std::max(exponent - 11, -24);  // exponent of one unit in the last place
  const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));  // to even
  // A normal number has 1024 to 2048 steps (2048 carries into the exponent), a subnormal one fewer.
  const std::uint32_t code = unit == -24 ? steps : steps + (static_cast<std::uint32_t>(unit + 24) << 10U);
  return static_cast<std::uint16_t>(sign | code);
}

std::vector<float> to_floats(const Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  std::vector<float> values(count);
  const auto fill = [&](const auto* source, auto convert) {
    for (std::size_t at = 0; at < count; ++at) values[at] = convert(source[at]);
  };
  switch (tensor.dtype) {
    case DType::fp64:
      fill(tensor.as<double>(), [](double value) { return static_cast<float>(value); });
      break;
    case DType::fp32:
      fill(tensor.as<float>(), [](float value) { return value; });
      break;
    case DType::fp16:
      fill(tensor.as<std::uint16_t>(), from_fp16);
      break;
    case DType::bf16:
      fill(tensor.as<std::uint16_t>(), from_bf16);
      break;
    case DType::e4m3:
      fill(tensor.as<std::uint8_t>(), detail::from_e4m3);
      break;
    case DType::e5m2:
      fill(tensor.as<std::uint8_t>(), detail::from_e5m2);
      break;
    case DType::int8:
      fill(tensor.as<std::int8_t>(), [](std::int8_t value) { return static_cast<float>(value); });
      break;
    default:
      throw Error(ErrorCode::invalid_argument, "tensor", tensor.describe(),
                  "fp64, fp32, fp16, bf16, e4m3, e5m2 or int8");
  }
  return values;
}

void store_float(const Tensor& tensor, std::int64_t index, float value) {
  switch (tensor.dtype) {
    case DType::fp32:
      tensor.as<float>()[index] = value;
      return;
    case DType::fp16:
      tensor.as<std::uint16_t>()[index] = to_fp16(value);
      return;
    case DType::bf16:
      tensor.as<std::uint16_t>()[index] = to_bf16(value);
      return;
    case DType::e4m3:
      tensor.as<std::uint8_t>()[index] = detail::to_e4m3(value);
      return;
    case DType::e5m2:
      tensor.as<std::uint8_t>()[index] = detail::to_e5m2(value);
      return;
    case DType::int8:
      tensor.as<std::int8_t>()[index] =
          std::isnan(value) ? 0 : static_cast<std::int8_t>(std::nearbyint(std::clamp(value, -128.0F, 127.0F)));
      return;
    default:
      throw Error(ErrorCode::invalid_argument, "tensor", tensor.describe(), "fp32, fp16, bf16, e4m3, e5m2 or int8");
  }
}

}  // namespace tessera::files
