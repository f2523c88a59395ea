// SPDX-License-Identifier: Apache-2.0
// Partial results that are not finite: a part without keys may hold anything, any other shows what it holds.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "cpu/reference/number.h"
#include "device/place.h"

namespace tessera::test {
namespace {

class CombineNotFinite : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, CombineNotFinite, every_place(), name_of_place);

TEST_P(CombineNotFinite, EmptyPartsAloneAreLeftOut) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  constexpr double kFar = 200;  // above the other part: its weight is below fp32's smallest number
  struct Row {
    std::array<double, 2> lse;
    std::array<bool, 2> non_finite;  // o of the part is NaN
    bool is_nan;                     // the result
  };
  constexpr std::array<Row, 8> kRows = {{
      {{kEmpty, kEmpty}, {true, true}, false},
      {{1, kEmpty}, {false, true}, false},
      {{kEmpty, 1}, {true, false}, false},
      {{kNaN, kEmpty}, {true, true}, true},
      {{kEmpty, kNaN}, {true, true}, true},
      {{kNaN, kNaN}, {true, true}, true},
      {{kNaN, 1}, {true, false}, true},
      {{kFar, 0}, {false, true}, true},
  }};
  constexpr std::int64_t kDim = 16;
  const auto count = static_cast<std::int64_t>(kRows.size());
  const cases::Case line = cases::Case::parse("combine sq=8 d=16 lse");
  cases::Inputs inputs(line);
  const Bindings& bindings = inputs.bindings();
  for (std::int64_t row = 0; row < count; ++row) {
    const Row& of = kRows[static_cast<std::size_t>(row)];
    for (std::int64_t part = 0; part < 2; ++part) {
      const auto at = static_cast<std::size_t>(part);
      reference::write(bindings[Slot::lse_parts], part * count + row, of.lse[at]);
      for (std::int64_t c = 0; c < kDim; ++c) {
        reference::write(bindings[Slot::o_parts], (part * count + row) * kDim + c, of.non_finite[at] ? kNaN : 0.5);
      }
    }
  }
  inputs.remember();
  const auto oracle = reference::compute(line.problem, bindings, reference::Arithmetic::oracle);
  PlacedRun run(inputs, make_plan(line.problem, target_));
  ASSERT_EQ(run.run(), "");
  EXPECT_EQ(judge(line.problem, bindings, oracle), "");
  for (std::int64_t row = 0; row < count; ++row) {
    const double o = reference::read(bindings[Slot::o], row * kDim);
    EXPECT_EQ(std::isnan(o), kRows[static_cast<std::size_t>(row)].is_nan) << row << ": " << o;
  }
}

}  // namespace
}  // namespace tessera::test
