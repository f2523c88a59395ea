// SPDX-License-Identifier: Apache-2.0
// SkipState: sizes, steps, ranges of tokens, files. What a run makes of it is in tests/ops/skip_test.cpp.
#include "tessera/skip_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "expect_error.h"

namespace tessera {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
constexpr ErrorCode kRange = ErrorCode::out_of_range;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

Problem mass_problem() {
  return Problem::parse("attention sq=300 sk=300 hq=2 d=16 block=64x64 list=bitmask skip=mass");
}
Problem threshold_problem() {
  return Problem::parse("attention sq=300 hq=2 d=16 block=64x64 list=bitmask skip=threshold");
}
SkipOptions threshold_options() { return {.ramp = {-5, -3}}; }

std::vector<std::uint32_t> blocks(const Problem& problem, std::vector<TokenRange> ranges) {
  return skip_blocks(problem, ranges, "must_do");
}

TEST(SkipState, TakesNoMoreMemoryThanPromised) {
  const Problem wan = Problem::parse("attention sq=75600 hq=40 d=128 dtype=bf16 block=128x128 list=bitmask skip=mass");
  const SkipState state(wan, {});
  EXPECT_LE(state.bytes(), 28'000'000U);
  EXPECT_EQ(state.bytes(), 40U * 591 * 19 * 4 + 40U * 591 * 591 + 40U * 75600 * 4);
  EXPECT_NE(state.describe().find("1.80 MB of list, 13.97 MB of masses, 12.10 MB of LSE, 27.86 MB in all"),
            std::string::npos)
      << state.describe();
  const Problem bits =
      Problem::parse("attention sq=75600 hq=40 d=128 dtype=bf16 block=128x128 list=bitmask skip=threshold");
  EXPECT_LE(SkipState(bits, threshold_options()).bytes(), 1'900'000U);
}

TEST(SkipState, ThresholdsRiseGeometricallyBehindTheWarmUp) {
  const std::vector<float> rows = skip_thresholds(
      mass_problem(), {.steps = 5, .warm_up = 1, .ramp = {0.001F, 0.016F}, .heads = {{1, {0.25F, 0.5F}}}});
  ASSERT_EQ(rows.size(), 10U);
  EXPECT_EQ(rows[0], kNothing);
  EXPECT_EQ(rows[1], kNothing);
  for (std::size_t step = 1; step < 5; ++step) {
    EXPECT_NEAR(rows[2 * step], std::log2(0.001) + static_cast<double>(step), 1e-5) << step;
    EXPECT_NEAR(rows[2 * step + 1], -2 + static_cast<double>(step) / 4, 1e-5) << step;
  }
  const std::vector<float> octaves = skip_thresholds(threshold_problem(), {.steps = 3, .warm_up = 0, .ramp = {-5, -3}});
  EXPECT_EQ(octaves, (std::vector<float>{-5, -5, -4, -4, -3, -3}));
}

TEST(SkipState, OptionsOutOfRangeAreRefused) {
  const auto refused = [](const SkipOptions& options, ErrorCode code, const char* argument, bool mass = true) {
    expect_error([&] { SkipState(mass ? mass_problem() : threshold_problem(), options); }, code, argument);
  };
  refused({.steps = 0}, kRange, "steps");
  refused({.steps = 3, .warm_up = 4}, kRange, "warm_up");
  refused({.warm_up = -1}, kRange, "warm_up");
  refused({.ramp = {0, 0.1F}}, kRange, "ramp.first");
  refused({.ramp = {0.1F, 4}}, kRange, "ramp.last");
  refused({.ramp = {std::nanf(""), 0.1F}}, kRange, "ramp.first");
  refused({.ramp = {-5, 0.5F}}, kRange, "ramp.last", false);
  refused({.ramp = {-101, -5}}, kRange, "ramp.first", false);
  refused({.heads = {{2, {0.1F, 0.1F}}}}, kRange, "heads");
  refused({.heads = {{1, {0.1F, -1}}}}, kRange, "heads[1].last");
  refused({.layer = "two\nlines"}, kInvalid, "layer");
  expect_error([] { SkipState(Problem::parse("attention sq=8 list=bitmask"), {}); }, kInvalid, "problem");
}

// LiteAttention rounds ranges outward, and one of its versions was off by one at their ends.
TEST(SkipState, RangesAreRoundedInwardAlsoAtRaggedEnds) {
  const Problem p = mass_problem();  // 300 keys: four whole tiles and 44 keys
  EXPECT_EQ(blocks(p, {{0, 64}}), (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(blocks(p, {{0, 127}}), (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(blocks(p, {{0, 128}}), (std::vector<std::uint32_t>{3}));
  EXPECT_EQ(blocks(p, {{1, 128}}), (std::vector<std::uint32_t>{2}));
  EXPECT_EQ(blocks(p, {{200, 300}}), (std::vector<std::uint32_t>{16}));
  EXPECT_EQ(blocks(p, {{192, 300}}), (std::vector<std::uint32_t>{24}));
  EXPECT_EQ(blocks(p, {{256, 300}, {64, 130}, {5, 5}}), (std::vector<std::uint32_t>{18}));
  EXPECT_EQ(blocks(p, {}), (std::vector<std::uint32_t>{0}));
  expect_error([&] { blocks(p, {{256, 299}}); }, kInvalid, "must_do");  // the last tile lacks its last key
  expect_error([&] { blocks(p, {{1, 64}}); }, kInvalid, "must_do");
  expect_error([&] { blocks(p, {{-1, 64}}); }, kRange, "must_do");
  expect_error([&] { blocks(p, {{64, 0}}); }, kRange, "must_do");
  expect_error([&] { blocks(p, {{0, 301}}); }, kRange, "must_do");
  // The second source's tokens follow the first's, and its tiles begin anew.
  const Problem two =
      Problem::parse("attention sq=64 sk=100 hq=1 d=16 kv2=dense sk2=70 block=64x64 list=bitmask skip=mass");
  EXPECT_EQ(blocks(two, {{64, 164}}), (std::vector<std::uint32_t>{6}));
  EXPECT_EQ(blocks(two, {{164, 170}}), (std::vector<std::uint32_t>{8}));
  expect_error([&] { blocks(two, {{128, 163}}); }, kInvalid, "must_do");
}

TEST(SkipState, RangesThatContradictAreRefusedAndNothingChanges) {
  SkipState state(mass_problem(), {});
  const std::vector<TokenRange> some{{0, 128}}, other{{64, 300}}, all{{0, 300}}, apart{{128, 300}};
  state.set_ranges({}, some);
  EXPECT_DOUBLE_EQ(state.active(), 0.6);
  expect_error([&] { state.set_ranges(some, other); }, kInvalid, "must_skip");
  expect_error([&] { state.set_ranges({}, all); }, kInvalid, "must_skip");
  EXPECT_DOUBLE_EQ(state.active(), 0.6);
  state.set_ranges(some, apart);
  EXPECT_DOUBLE_EQ(state.active(), 0.4);
  state.set_ranges({}, {});
  EXPECT_DOUBLE_EQ(state.active(), 1.0);
}

TEST(SkipState, StepsGoForwardOrBeginAnew) {
  SkipState state(threshold_problem(), {.steps = 4, .warm_up = 0, .ramp = {-6, -3}});
  Bindings bindings;
  state.bind(0, bindings);
  EXPECT_EQ(*bindings[Slot::skip_step].as<std::int32_t>(), 0);
  state.bind(1, bindings);
  EXPECT_EQ(*bindings[Slot::skip_step].as<std::int32_t>(), 1);
  EXPECT_EQ(bindings[Slot::skip_threshold].as<float>()[1], -5.0F);
  expect_error([&] { state.bind(1, bindings); }, kRange, "step");
  expect_error([&] { state.bind(4, bindings); }, kRange, "step");
  expect_error([&] { state.bind(-1, bindings); }, kRange, "step");
  state.bind(3, bindings);
  expect_error([&] { state.bind(2, bindings); }, kRange, "step");
  bindings[Slot::tile_bits].as<std::uint32_t>()[0] = 1;
  EXPECT_LT(state.active(), 1.0);
  state.bind(0, bindings);
  EXPECT_EQ(state.active(), 1.0);
  EXPECT_EQ(state.next_step(), 1);
}

TEST(SkipState, AFileBringsBackWhatWasSaved) {
  SkipOptions options{.steps = 9, .layer = "blocks.3"};
  SkipState state(mass_problem(), options);
  Bindings bindings;
  state.bind(4, bindings);
  bindings[Slot::tile_bits].as<std::uint32_t>()[3] = 5;
  bindings[Slot::skip_memory].as<std::uint8_t>()[17] = 99;
  bindings[Slot::skip_lse].as<float>()[599] = 2.5F;
  const std::vector<std::byte> saved = state.save();
  const std::string_view text(reinterpret_cast<const char*>(saved.data()), saved.size());
  EXPECT_EQ(text.find("tessera skip state 1\nattention sq=300 hq=2 list=bitmask skip=mass\nblocks.3\n5\n"), 0U)
      << text.substr(0, 200);
  SkipState other(mass_problem(), options);
  other.load(saved);
  EXPECT_EQ(other.save(), saved);
  EXPECT_EQ(other.next_step(), 5);
  EXPECT_EQ(other.active(), state.active());

  const std::vector<std::byte> before = state.save();
  const auto refused = [&](SkipState& to, std::vector<std::byte> bytes, const char* argument) {
    expect_error([&] { to.load(bytes); }, kInvalid, argument);
  };
  refused(state, {}, "saved");
  refused(state, std::vector<std::byte>(saved.begin(), saved.end() - 1), "saved");
  std::vector<std::byte> longer = saved;
  longer.push_back(std::byte{0});
  refused(state, longer, "saved");
  EXPECT_EQ(state.save(), before);
  // One instance for all layers of a shape is what LiteAttention's example for CogVideoX had.
  options.layer = "blocks.4";
  SkipState another_layer(mass_problem(), options);
  refused(another_layer, saved, "layer");
  SkipState another_shape(Problem::parse("attention sq=300 sk=301 hq=2 d=16 block=64x64 list=bitmask skip=mass"),
                          {.steps = 9, .layer = "blocks.3"});
  refused(another_shape, saved, "problem");
}

TEST(SkipState, AFileWithBitsBehindTheLastKeyBlockIsRefused) {
  SkipState state(mass_problem(), {});
  std::vector<std::byte> saved = state.save();
  // Five key blocks: a word of the list for each of 2 · 5 row tiles, in front of codes and LSE.
  const std::size_t list = saved.size() - state.bytes();
  saved[list + 4 * 7] = std::byte{0x11};  // block 4 is the last
  state.load(saved);
  const std::vector<std::byte> before = state.save();
  EXPECT_EQ(before, saved);
  saved[list + 4 * 7] = std::byte{0x31};
  try {
    state.load(saved);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), kInvalid);
    EXPECT_EQ(error.argument(), "saved");
    EXPECT_EQ(error.got(), "a list with key block 5");
  }
  EXPECT_EQ(state.save(), before);
}

TEST(SkipState, ReshapeBeginsAnewWithTheSameRule) {
  SkipState state(mass_problem(), {});
  Bindings bindings;
  state.bind(7, bindings);
  const std::vector<TokenRange> some{{0, 64}};
  state.set_ranges({}, some);
  const std::size_t before = state.bytes();
  state.reshape(Problem::parse("attention b=2 sq=300 hq=2 d=16 block=64x64 list=bitmask skip=mass"));
  EXPECT_EQ(state.bytes(), 2 * before);
  EXPECT_EQ(state.active(), 1.0);
  EXPECT_EQ(state.next_step(), 0);
  expect_error([&] { state.reshape(threshold_problem()); }, kInvalid, "skip");
  EXPECT_EQ(state.bytes(), 2 * before);
}

}  // namespace
}  // namespace tessera
