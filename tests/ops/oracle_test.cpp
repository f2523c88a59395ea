// SPDX-License-Identifier: Apache-2.0
// The oracle is tested by what it does not share: finite differences, published vectors, and cases done by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/inputs/inputs.h"
#include "cases/line/case.h"
#include "cpu/reference/number.h"
#include "cpu/reference/reference.h"

namespace tessera::test {
namespace {

using cases::Case;
using cases::Inputs;
using reference::Arithmetic;

/// dout · O + dlse · LSE, whose gradients a backward gives.
double loss(const Problem& backward, const Bindings& bindings) {
  Problem forward = backward;
  forward.pass = Pass::forward;
  forward.lse = true;
  forward.dlse = false;
  const reference::Result result = reference::compute(forward, bindings, Arithmetic::oracle);
  double sum = 0;
  const Tensor& dout = bindings[Slot::dout];
  reference::for_each_element(dout, [&](std::int64_t index, std::int64_t offset) {
    sum += reference::read(dout, offset) * result[Slot::o].values[static_cast<std::size_t>(index)];
  });
  const Tensor& dlse = bindings[Slot::dlse];
  if (!dlse) return sum;
  reference::for_each_element(dlse, [&](std::int64_t index, std::int64_t offset) {
    const double lse = result[Slot::lse].values[static_cast<std::size_t>(index)];
    if (std::isfinite(lse)) sum += reference::read(dlse, offset) * lse;
  });
  return sum;
}

class Gradients : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Scores, Gradients,
                         ::testing::Values("", "causal", "softcap=1.5", "alibi", "score=soft_clip",
                                           "score=relative mask=checkerboard", "sink", "dropout=0.4 drop_seed=9",
                                           "dlse", "sink dlse softcap=2 causal",
                                           "sink dropout=0.3 dlse score=soft_clip alibi window=4:2",
                                           "block=3x2 list=bitmask:q:b:full mask=prefix",
                                           "kv2=dense sk2=4 causal sink dlse", "compressed_causal=2:1 dlse",
                                           "chunk=4 dlse", "scale=0.9 softcap=1 dropout=0.2 sink"));

TEST_P(Gradients, AreFiniteDifferencesOfTheForward) {
  // In double, but for the LSE that a backward reads (fp32): hence 1e-6.
  Case one = Case::parse(std::string("attention pass=backward b=2 sq=7 sk=6 hq=4 hkv=2 d=8 seed=3 ") + GetParam());
  one.problem.q_type = one.problem.k_type = one.problem.v_type = one.problem.o_type = DType::fp64;
  Inputs inputs(one);
  const Bindings& bindings = inputs.bindings();
  const reference::Result result = reference::compute(one.problem, bindings, Arithmetic::oracle);
  for (const auto& [input, gradient] :
       {std::pair{Slot::q, Slot::dq}, std::pair{Slot::k, Slot::dk}, std::pair{Slot::v, Slot::dv},
        std::pair{Slot::k2, Slot::dk2}, std::pair{Slot::v2, Slot::dv2}, std::pair{Slot::sink, Slot::dsink}}) {
    const Tensor& tensor = bindings[input];
    if (!tensor) continue;
    const reference::Output& derivatives = result[gradient];
    const std::string name(to_string(gradient));
    const double step = tensor.dtype == DType::fp64 ? 1e-5 : 0x1p-8;  // sinks are fp32
    const double tolerance = tensor.dtype == DType::fp64 ? 1e-6 : 1e-4;
    reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
      if (index % 5 != 0 && tensor.dtype == DType::fp64) return;
      const double value = reference::read(tensor, offset);
      reference::write(tensor, offset, value + step);
      const double width_up = reference::read(tensor, offset) - value;
      const double up = loss(one.problem, bindings);
      reference::write(tensor, offset, value - step);
      const double width_down = value - reference::read(tensor, offset);
      const double down = loss(one.problem, bindings);
      reference::write(tensor, offset, value);
      EXPECT_NEAR((up - down) / (width_up + width_down), derivatives.values[static_cast<std::size_t>(index)], tolerance)
          << name << " " << index;
    });
  }
}

TEST(Oracle, PhiloxGivesThePublishedVectors) {
  // Random123 1.09, kat_vectors: philox4x32 10.
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(reference::philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(reference::philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference::philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Oracle, TwoKeysByHand) {
  Case one = Case::parse("attention sq=1 sk=2 d=8 lse scale=1");
  Inputs inputs(one);
  const Bindings& bindings = inputs.bindings();
  for (std::int64_t c = 0; c < 8; ++c) {
    reference::write(bindings[Slot::q], c, c == 0 ? 1 : 0);
    reference::write(bindings[Slot::k], c, c == 0 ? std::log(3.0F) : 0);  // scores log 3 and 0: weights 3/4 and 1/4
    reference::write(bindings[Slot::k], 8 + c, 0);
    reference::write(bindings[Slot::v], c, static_cast<double>(c));
    reference::write(bindings[Slot::v], 8 + c, 4);
  }
  const reference::Result result = reference::compute(one.problem, bindings, Arithmetic::oracle);
  for (std::size_t c = 0; c < 8; ++c) {
    EXPECT_NEAR(result[Slot::o].values[c], 0.75 * static_cast<double>(c) + 1, 1e-7);
  }
  EXPECT_NEAR(result[Slot::lse].values[0], std::log(4.0), 1e-7);
}

TEST(Oracle, OrderOfSummationChangesOnlyRounding) {
  const Case one = Case::parse("attention pass=backward b=2 sq=30 sk=40 hq=4 hkv=2 d=24 sink causal dlse seed=2");
  Inputs inputs(one);
  const auto run = [&](Arithmetic arithmetic, std::uint32_t order) {
    return reference::compute(one.problem, inputs.bindings(), arithmetic, order);
  };
  const reference::Result oracle = run(Arithmetic::oracle, 0);
  const reference::Result oracle_again = run(Arithmetic::oracle, 5);
  const reference::Result plain = run(Arithmetic::plain, 0);
  const reference::Result plain_again = run(Arithmetic::plain, 5);
  for (const Slot slot : {Slot::dq, Slot::dk, Slot::dv, Slot::dsink}) {
    bool differs = false;
    for (std::size_t i = 0; i < oracle[slot].values.size(); ++i) {
      EXPECT_NEAR(oracle[slot].values[i], oracle_again[slot].values[i], 1e-13);
      EXPECT_NEAR(oracle[slot].values[i], plain[slot].values[i], 1e-5);
      EXPECT_NEAR(oracle[slot].values[i], plain_again[slot].values[i], 1e-5);
      differs = differs || plain[slot].values[i] != plain_again[slot].values[i];
    }
    EXPECT_TRUE(differs) << to_string(slot);
  }
}

// P of e4m3 costs what three digits of it cost, and not more: a row of one key nothing, others up to 2^-4 of a value.
TEST(Oracle, ProductsOfBytesRoundProbabilitiesToThreeDigits) {
  const Case one = Case::parse("attention sq=64 hq=2 d=64 dtype=e4m3:e4m3:e4m3:fp32 causal lse seed=3");
  Inputs inputs(one);
  const auto run = [&](Arithmetic arithmetic, std::uint32_t order) {
    return reference::compute(one.problem, inputs.bindings(), arithmetic, order);
  };
  const reference::Result oracle = run(Arithmetic::oracle, 0);
  double largest = 0;
  for (const double value : oracle[Slot::o].values) largest = std::max(largest, std::fabs(value));
  for (const std::uint32_t order : {0U, 1U, 2U, 7U}) {
    const reference::Result bytes = run(Arithmetic::byte_products, order);
    double worst = 0;
    for (std::size_t i = 0; i < oracle[Slot::o].values.size(); ++i) {
      const double error = std::fabs(bytes[Slot::o].values[i] - oracle[Slot::o].values[i]);
      worst = std::max(worst, error);
      if (i < 128 && order == 0) {  // the first token sees one key
        EXPECT_NEAR(error, 0, 1e-5 * largest) << i;
      }
    }
    EXPECT_GT(worst, 1e-3 * largest) << order;
    EXPECT_LT(worst, largest / 16) << order;
    for (std::size_t i = 0; i < oracle[Slot::lse].values.size(); ++i) {
      EXPECT_NEAR(bytes[Slot::lse].values[i], oracle[Slot::lse].values[i], 0x1p-9) << i;
    }
  }
}

TEST(Numbers, HalvesRoundTripAndRoundToEven) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = reference::fp16_to_float(half);
    if (value != value) continue;
    EXPECT_EQ(reference::float_to_fp16(value), half);
    EXPECT_EQ(reference::round_to_fp16(value), value);
  }
  EXPECT_EQ(reference::round_to_fp16(1.0F + 0x1p-11F), 1.0F);  // halfway: to even
  EXPECT_EQ(reference::round_to_fp16(1.0F + 0x3p-11F), 1.0F + 0x1p-9F);
  EXPECT_EQ(reference::round_to_fp16(65519.0F), 65504.0F);
  EXPECT_TRUE(std::isinf(reference::round_to_fp16(65520.0F)));
  EXPECT_EQ(reference::round_to_fp16(0x1p-25F), 0.0F);
  EXPECT_EQ(reference::round_to_fp16(0x1.8p-25F), 0x1p-24F);
  EXPECT_EQ(reference::round_to_bf16(1.0F + 0x1p-8F), 1.0F);
  EXPECT_EQ(reference::round_to_bf16(1.0F + 0x3p-8F), 1.0F + 0x1p-6F);
}

}  // namespace
}  // namespace tessera::test
