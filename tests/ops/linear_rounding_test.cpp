// SPDX-License-Identifier: Apache-2.0
// rounding=stochastic of linear_decode: the expected value of a bf16 state is the fp32 one, seeds repeat, and updates
// too small for rounding to nearest are not lost.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cases/inputs/poison.h"
#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"
#include "ops/random_floats.h"
#include "tessera/executor.h"

namespace tessera {
namespace {

using States = std::vector<std::uint16_t>;
constexpr std::int64_t kRoundedDim = 16, kRoundedHeads = 2, kRoundedSlots = 3;

float value_of(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Steps without decay on bf16 states, of one sequence.
class Steps {
 public:
  Steps(Floats k, Floats v, const std::string& words)
      : k_(std::move(k)),
        v_(std::move(v)),
        q_(k_.size()),
        o_(v_.size()),
        executor_(make_plan(Problem::parse("linear_decode h=2 d=16 state=bf16 slots=3 " + words), Target::cpu(1))) {}

  void run(States& states, std::uint64_t seed, std::uint64_t offset, std::int32_t slot = 1) {
    std::int32_t slots[] = {slot};
    Bindings bindings;
    const auto rows = [&](Slot of, Floats& values) {
      bindings[of] = Tensor::contiguous(values.data(), DType::fp32, {1, 1, kRoundedHeads, kRoundedDim});
    };
    rows(Slot::q, q_);
    rows(Slot::k, k_);
    rows(Slot::v, v_);
    rows(Slot::o, o_);
    bindings[Slot::state] =
        Tensor::contiguous(states.data(), DType::bf16, {kRoundedSlots, kRoundedHeads, kRoundedDim, kRoundedDim});
    bindings[Slot::state_slots] = Tensor::contiguous(slots, DType::int32, {1});
    bindings[Slot::decay_slopes] = Tensor::contiguous(slopes_.data(), DType::fp32, {kRoundedHeads});
    bindings.seed = seed;
    bindings.offset = offset;
    executor_.run(bindings);
  }

 private:
  Floats k_, v_, q_, o_, slopes_ = Floats(kRoundedHeads, 0.0F);
  Executor executor_;
};

States zeros() { return States(static_cast<std::size_t>(kRoundedSlots * kRoundedHeads * kRoundedDim * kRoundedDim)); }

class StochasticRounding : public testing::TestWithParam<const char*> {
 protected:
  [[nodiscard]] std::string words() const { return std::string("rounding=stochastic layout=") + GetParam(); }
  /// Of k and v, at (head, row, column) as the layout has them.
  static float product(const Floats& k, const Floats& v, std::int64_t head, std::int64_t row, std::int64_t column) {
    const bool vk = std::string(GetParam()) == "vk";
    return k[static_cast<std::size_t>(head * kRoundedDim + (vk ? column : row))] *
           v[static_cast<std::size_t>(head * kRoundedDim + (vk ? row : column))];
  }
  /// Of slot 1: (head, row, column) as the layout has them.
  [[nodiscard]] static std::size_t index(std::int64_t head, std::int64_t row, std::int64_t column,
                                         std::int64_t slot = 1) {
    return static_cast<std::size_t>(((slot * kRoundedHeads + head) * kRoundedDim + row) * kRoundedDim + column);
  }
};
INSTANTIATE_TEST_SUITE_P(Linear, StochasticRounding, testing::Values("vk", "kv"));

TEST_P(StochasticRounding, IsThePublishedGeneratorOnTheDocumentedCounter) {
  const Floats k = random_floats(21, kRoundedHeads * kRoundedDim), v = random_floats(22, kRoundedHeads * kRoundedDim);
  constexpr std::uint64_t kSeed = 0x1234567890ABCDEF, kOffset = 0xFEDCBA9876543210;
  for (const std::int32_t slot : {0, 2}) {
    States states = zeros();
    Steps(k, v, words()).run(states, kSeed, kOffset, slot);
    for (std::int64_t head = 0; head < kRoundedHeads; ++head) {
      for (std::int64_t row = 0; row < kRoundedDim; ++row) {
        for (std::int64_t column = 0; column < kRoundedDim; ++column) {
          const float exact = product(k, v, head, row, column);
          const auto element = static_cast<std::uint32_t>(row * kRoundedDim + column);
          const std::uint64_t key = kSeed ^ (kOffset >> 32 << 32);
          const auto random =
              reference::philox({element / 8, static_cast<std::uint32_t>(head), static_cast<std::uint32_t>(slot),
                                 static_cast<std::uint32_t>(kOffset)},
                                {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)});
          const std::uint32_t draw = random[element % 8 / 2] >> (16 * (element % 2)) & 0xffffU;
          EXPECT_EQ(states[index(head, row, column, slot)], (std::bit_cast<std::uint32_t>(exact) + draw) >> 16);
        }
      }
    }
  }
}

TEST_P(StochasticRounding, NaNOfAnyPayloadStaysNaN) {
  for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
    const Floats k(kRoundedHeads * kRoundedDim, 1.0F);
    Floats v(kRoundedHeads * kRoundedDim, 1.0F);
    v[3] = std::bit_cast<float>(cases::nan_bits(DType::fp32, kind));
    States states = zeros();
    Steps(k, v, words()).run(states, 7, 9);
    const bool vk = std::string(GetParam()) == "vk";
    for (std::int64_t i = 0; i < kRoundedDim; ++i) {
      EXPECT_TRUE(std::isnan(value_of(states[index(0, vk ? 3 : i, vk ? i : 3)]))) << kind << " " << i;
      EXPECT_EQ(value_of(states[index(1, i, i)]), 1.0F);
    }
  }
}

TEST_P(StochasticRounding, TheMeanIsTheValue) {
  const Floats k = random_floats(23, kRoundedHeads * kRoundedDim), v = random_floats(24, kRoundedHeads * kRoundedDim);
  Steps steps(k, v, words());
  constexpr int kRuns = 2000;
  std::vector<double> sums(zeros().size(), 0.0);
  for (int run = 0; run < kRuns; ++run) {
    States states = zeros();
    steps.run(states, 7, static_cast<std::uint64_t>(run));
    for (std::size_t i = 0; i < states.size(); ++i) sums[i] += static_cast<double>(value_of(states[i]));
  }
  // Of each element by itself, and of all: errors in units of the deviation of a mean of as many draws.
  double total = 0, squares = 0;
  int count = 0;
  for (std::int64_t head = 0; head < kRoundedHeads; ++head) {
    for (std::int64_t row = 0; row < kRoundedDim; ++row) {
      for (std::int64_t column = 0; column < kRoundedDim; ++column) {
        const float exact = product(k, v, head, row, column);
        const double up = static_cast<double>(std::bit_cast<std::uint32_t>(exact) & 0xffffU) / 65536;
        const double spacing = std::ldexp(1.0, std::ilogb(exact) - 7);
        const double deviation = spacing * std::sqrt(up * (1 - up) / kRuns);
        if (up * (1 - up) * kRuns < 20) continue;  // too rare for a normal distribution
        const double error = (sums[index(head, row, column)] / kRuns - static_cast<double>(exact)) / deviation;
        EXPECT_LT(std::fabs(error), 5.0) << head << ' ' << row << ' ' << column;
        total += exact > 0 ? error : -error;
        squares += error * error;
        ++count;
      }
    }
  }
  ASSERT_GT(count, 400);
  EXPECT_LT(std::fabs(total) / std::sqrt(count), 4.0);
  EXPECT_NEAR(squares / count, 1.0, 0.3);  // draws of one element are independent from offset to offset
}

TEST_P(StochasticRounding, RepeatsUnderOneSeed) {
  Steps steps(random_floats(25, kRoundedHeads * kRoundedDim), random_floats(26, kRoundedHeads * kRoundedDim), words());
  const auto result = [&](std::uint64_t seed, std::uint64_t offset) {
    States states = zeros();
    steps.run(states, seed, offset);
    return states;
  };
  EXPECT_EQ(result(3, 4), result(3, 4));
  EXPECT_NE(result(3, 4), result(3, 5));
  EXPECT_NE(result(3, 4), result(2, 4));
  EXPECT_NE(result(3, 4), result(3, 4 + (std::uint64_t{1} << 40)));
}

/// 512 times 1/1024 beside a state of 1, whose spacing is 1/128.
TEST_P(StochasticRounding, SmallUpdatesAreNotLost) {
  constexpr int kSteps = 512;
  const Floats k(kRoundedHeads * kRoundedDim, 1.0F), v(kRoundedHeads * kRoundedDim, 1.0F / 1024);
  const auto mean_after = [&](const std::string& rounding) {
    States states(zeros().size(), 0x3f80);
    Steps steps(k, v, rounding);
    for (int step = 0; step < kSteps; ++step) steps.run(states, 11, static_cast<std::uint64_t>(step));
    double sum = 0;
    for (std::int64_t i = 0; i < kRoundedHeads * kRoundedDim * kRoundedDim; ++i)
      sum += static_cast<double>(value_of(states[index(0, 0, i)]));
    return sum / static_cast<double>(kRoundedHeads * kRoundedDim * kRoundedDim);
  };
  EXPECT_EQ(mean_after(std::string("layout=") + GetParam()), 1.0);
  // The deviation of one is at most sqrt(512 · 1/8 · 7/8) / 128 = 0.058, of the mean of 512 a 22nd of that.
  EXPECT_NEAR(mean_after(words()), 1.5, 5 * 0.058 / std::sqrt(512.0));
}

TEST(StochasticRoundingOf, NaNAndInfinityStay) {
  Floats k(kRoundedHeads * kRoundedDim, 1.0F), v(kRoundedHeads * kRoundedDim, 1.0F);
  v[0] = std::nanf("");
  v[1] = std::numeric_limits<float>::infinity();
  v[2] = -v[1];
  States states = zeros();
  Steps(k, v, "rounding=stochastic").run(states, 1, 2);
  const std::size_t first = static_cast<std::size_t>(kRoundedHeads * kRoundedDim * kRoundedDim);  // slot 1
  EXPECT_TRUE(std::isnan(value_of(states[first])));
  EXPECT_EQ(value_of(states[first + kRoundedDim]), v[1]);
  EXPECT_EQ(value_of(states[first + 2 * kRoundedDim]), v[2]);
  EXPECT_EQ(value_of(states[first + 3 * kRoundedDim]), 1.0F);
}

}  // namespace
}  // namespace tessera
