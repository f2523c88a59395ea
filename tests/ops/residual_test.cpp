// SPDX-License-Identifier: Apache-2.0
// The bytes of O's residual on every instruction set, beside the oracle's, which come of another formula.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/reference/number.h"
#include "cpu/simd/kernels.h"

namespace tessera::test {
namespace {

/// Of every exponent, with its ends and ties of both types; as many as no vector divides.
std::vector<float> values() {
  std::vector<float> all = {0.0F, -0.0F, 65504.0F, 65519.0F, 65520.0F, 1e30F, std::numeric_limits<float>::max()};
  std::mt19937 random(5);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const std::uint32_t fraction : {0U, 1U, 0x7FFFFFU, 0x8000U, 0x18000U, 0x1000U, 0x3000U}) {
      all.push_back(std::bit_cast<float>(exponent << 23U | fraction));
    }
    for (int i = 0; i < 20; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      all.push_back(std::bit_cast<float>((bits & 0x807FFFFFU) | exponent << 23U));
    }
  }
  all.push_back(std::numeric_limits<float>::infinity());
  all.push_back(std::numeric_limits<float>::quiet_NaN());
  return all;
}

/// Where the spacing that the bytes count in is that of o's type; below, its own.
double bound(DType dtype, double rounded) { return reference::residual_step(dtype, rounded) / 2; }

TEST(Residual, BytesAreTheOraclesOnEveryInstructionSet) {
  const std::vector<float> exact = values();
  const auto count = static_cast<std::int64_t>(exact.size());
  for (const std::string& isa : cpu::usable_isas()) {
    const cpu::Kernels& kernels = cpu::kernels_for(isa);
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      std::vector<std::uint16_t> o(exact.size());
      std::vector<std::int8_t> bytes(exact.size() + 1, 99);
      std::vector<float> sums((exact.size() + 15) / 16 * 16);
      auto* rounded = reinterpret_cast<std::byte*>(o.data());
      kernels.store_row(dtype, exact.data(), count, rounded);
      kernels.store_residual(dtype, exact.data(), rounded, count, bytes.data());
      EXPECT_EQ(bytes.back(), 99);
      kernels.load_row(dtype, rounded, count, 1.0F, sums.data(), static_cast<std::int64_t>(sums.size()));
      const std::vector<float> of_o = sums;
      kernels.add_residual(dtype, bytes.data(), count, sums.data());
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const auto value = static_cast<double>(exact[i]);
        const auto about = [&] { return isa + " " + std::string(to_string(dtype)) + " " + std::to_string(value); };
        ASSERT_EQ(bytes[i], reference::residual_of(dtype, value)) << about();
        if (!std::isfinite(of_o[i])) {
          ASSERT_TRUE(sums[i] == of_o[i] || std::isnan(sums[i])) << about();
          continue;
        }
        const double rounding = std::max(std::fabs(value) * 0x1p-23, 0x1p-149);
        ASSERT_LE(std::fabs(static_cast<double>(sums[i]) - value), bound(dtype, of_o[i]) + rounding) << about();
        if (value == static_cast<double>(of_o[i])) {
          ASSERT_EQ(sums[i], of_o[i]) << about();
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test
