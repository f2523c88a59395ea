// SPDX-License-Identifier: Apache-2.0
// Rows to 8 bits by extreme descales, which kernels divide by in another way than by ordinary ones, and of extreme
// numbers.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "cpu/reference/number.h"
#include "device/place.h"

namespace tessera::test {
namespace {

class QuantizeExtremes : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, QuantizeExtremes, every_place(), name_of_place);

// As multiples of a row's descale, or as they are.
constexpr std::array<double, 16> kMultiples = {0,   1,   -1,   0.5, 1.0625,  -1.1875,      17,   19,
                                               447, 463, -465, 500, 0.00098, 0.0009765625, 3e-4, 1e-12};

TEST_P(QuantizeExtremes, DescalesOfAnySize) {
  const std::array<double, 12> descales = {
      0x1p-126, 0x1.8p-126,   0x1.fffffep-61, 0x1p-60,       0x1.fffffep-60, 0x1.3p-7,
      1,        0x1.fffffep0, 0x1.555556p+3,  0x1.fffffep59, 0x1p60,         0x1.555556p126};
  for (const char* to : {"e4m3", "e5m2", "int8"}) {
    const cases::Case line =
        cases::Case::parse(std::string("quantize sq=12 hq=1 d=16 descale=token given saturated to=") + to);
    cases::Inputs inputs(line);
    const Bindings& bindings = inputs.bindings();
    for (std::int64_t row = 0; row < 12; ++row) {
      const double descale = descales[static_cast<std::size_t>(row)];
      reference::write(bindings[Slot::x_descale], row, descale);
      for (std::int64_t c = 0; c < 16; ++c) {
        reference::write(bindings[Slot::x], row * 16 + c, kMultiples[static_cast<std::size_t>(c)] * descale);
      }
    }
    inputs.remember();
    const auto oracle = reference::compute(line.problem, bindings, reference::Arithmetic::oracle);
    PlacedRun run(inputs, make_plan(line.problem, target_));
    ASSERT_EQ(run.run(), "");
    EXPECT_EQ(judge(line.problem, bindings, oracle), "") << to;
  }
}

TEST_P(QuantizeExtremes, NumbersThatAreNotFinite) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kLargest = std::numeric_limits<float>::max();
  constexpr std::array<double, 8> kNumbers = {kInfinity, -kInfinity, kNaN, kLargest, -kLargest, 0x1p-149, 3, 0};
  for (const char* grain : {"descale=token", "descale=block:4", "descale=block:100", ""}) {
    const cases::Case line = cases::Case::parse(std::string("quantize sq=80 hq=1 d=16 ") + grain);
    cases::Inputs inputs(line);
    const Bindings& bindings = inputs.bindings();
    for (std::int64_t row = 0; row < 80; ++row) {
      // One of them in every row, so that a row's or a block's largest finite number stands beside it.
      reference::write(bindings[Slot::x], row * 16 + row % 16, kNumbers[static_cast<std::size_t>(row % 8)]);
    }
    inputs.remember();
    const auto oracle = reference::compute(line.problem, bindings, reference::Arithmetic::oracle);
    PlacedRun run(inputs, make_plan(line.problem, target_));
    ASSERT_EQ(run.run(), "");
    EXPECT_EQ(judge(line.problem, bindings, oracle), "") << grain;
  }
}

}  // namespace
}  // namespace tessera::test
