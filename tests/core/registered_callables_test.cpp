// SPDX-License-Identifier: Apache-2.0
// Scores and masks that are registered by name: what is refused, and what the CPU computes with their host functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/call.h"
#include "core/expect_error.h"
#include "problem/registered_callables.h"
#include "tessera/callable.h"

namespace tessera {
namespace {

double times_two(double score, const ScorePoint& /*at*/, const Extras& /*extras*/, void* /*user*/) { return 2 * score; }
double two(double /*score*/, const ScorePoint& /*at*/, const Extras& /*extras*/, void* /*user*/) { return 2; }
double biased(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return score + extras(0, at.head, at.query - at.key + 4);
}
bool same_document(const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return extras(0, at.query) == extras(0, at.key);
}

void expect_refused(std::string_view name, ScoreText text, std::string_view argument) {
  const bool was_there = registered_score(name) != nullptr;
  expect_error([&] { register_score(name, text); }, ErrorCode::invalid_argument, argument);
  EXPECT_EQ(registered_score(name) != nullptr, was_there) << name;
}

void fill(const Tensor& tensor, int step) {
  auto* values = tensor.as<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values[i] = std::sin(0.7F * static_cast<float>(i * step + step));
}

void fill_inputs(Call& call) {
  fill(call[Slot::q], 1);
  fill(call[Slot::k], 2);
  fill(call[Slot::v], 3);
}

TEST(Registry, KeepsWhatWasRegistered) {
  const ScoreText text{"score * 0.5F", {{"bias", DType::bf16, 2}}};
  register_score("registry.kept", text);
  register_score("registry.kept", text);  // the same once more
  ASSERT_NE(registered_score("registry.kept"), nullptr);
  EXPECT_EQ(*registered_score("registry.kept"), text);
  EXPECT_EQ(registered_mask("registry.kept"), nullptr);  // a name for each kind
  register_mask("registry.kept", {"at.key % 2 == 0", {}});
  EXPECT_EQ(registered_mask("registry.kept")->text, "at.key % 2 == 0");
  EXPECT_EQ(registered_score(""), nullptr);
}

TEST(Registry, ATakenNameIsNamed) {
  register_score("registry.taken", {"score", {}});
  ScoreText differentiable{"score", {}};
  differentiable.derivative_text = "1.0F";
  for (const ScoreText& other : {ScoreText{"score + 0.0F", {}}, ScoreText{"score", {{"bias", DType::fp32, 1}}},
                                 ScoreText{"score", {}, times_two}, differentiable}) {
    try {
      register_score("registry.taken", other);
      ADD_FAILURE() << "replaced";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "name");
      EXPECT_NE(error.got().find("registry.taken"), std::string::npos) << error.got();
    }
  }
  EXPECT_EQ(registered_score("registry.taken")->text, "score");
}

TEST(Registry, RefusesNamesTextsAndExtras) {
  expect_refused("", {"score", {}}, "name");
  expect_refused("relative", {"score", {}}, "name");
  expect_refused("two words", {"score", {}}, "name");
  expect_refused("a\"b", {"score", {}}, "name");
  expect_refused(std::string(65, 'x'), {"score", {}}, "name");
  expect_refused("refused", {"", {}}, "text");
  expect_refused("refused", {" \n\t", {}}, "text");
  expect_refused("refused", {std::string("score\0", 6), {}}, "text");
  for (const std::string& derivative : {std::string(), std::string(" \n"), std::string("1\0", 2)}) {
    ScoreText text{"score", {}};
    text.derivative_text = derivative;
    expect_refused("refused", text, "derivative_text");
  }
  for (const char* name : {"", "1st", "a b", "a-b", "score", "at", "extras", "float", "return", "__x"}) {
    expect_refused("refused", {"score", {{name, DType::fp32, 1}}}, "extras");
  }
  expect_refused("refused", {"score", {{"a", DType::fp32, 1}, {"a", DType::fp32, 2}}}, "extras");
  expect_refused("refused", {"score", {{"a", DType::fp64, 1}}}, "extras");
  expect_refused("refused", {"score", {{"a", DType::fp32, 5}}}, "extras");
  expect_refused("refused", {"score", {{"a", DType::fp32, -1}}}, "extras");
  const ExtraTensor one{"a", DType::fp32, 1};
  expect_refused("refused", {"score", {one, {"b"}, {"c"}, {"d"}, {"e"}}}, "extras");
  expect_error([] { register_mask("document", {"true", {}}); }, ErrorCode::invalid_argument, "name");
  register_mask("relative", {"true", {}});  // built in as a score only
}

TEST(Registry, TakesThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        register_score("threads." + std::to_string(i), {"score + " + std::to_string(i) + ".0F", {}});
        EXPECT_NE(registered_score("threads." + std::to_string((i + t) % (i + 1))), nullptr);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(registered_score("threads.49")->text, "score + 49.0F");
}

TEST(Extras, ReadElementsOfEachTypeAndClampIndices) {
  const float fp32[] = {1.5F, -2.25F, 3.0F, 4.0F, 5.0F, 6.0F};
  const std::uint16_t fp16[] = {0x3C00, 0xC000, 0x0001, 0x7C00, 0xFBFF};  // 1, −2, 2⁻²⁴, ∞, −65504
  const std::uint16_t bf16[] = {0x3F80, 0xC040};                          // 1, −3
  const std::int64_t int64[] = {-(std::int64_t{1} << 40)};
  const std::uint8_t uint8[] = {0, 255};
  const auto view = [](const void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(const_cast<void*>(data), dtype, shape);
  };
  const Tensor tensors[] = {view(fp32, DType::fp32, {2, 3}), view(fp16, DType::fp16, {5}), view(bf16, DType::bf16, {2}),
                            view(int64, DType::int64, {}), view(uint8, DType::uint8, {2})};
  const Extras extras(tensors, 5);
  EXPECT_EQ(extras.count(), 5);
  EXPECT_EQ(extras(0, 1, 2), 6.0);
  EXPECT_EQ(extras(0, 9, -4), 4.0);
  EXPECT_EQ(extras(0, -1, 7), 3.0);
  EXPECT_EQ(extras(1, 0), 1.0);
  EXPECT_EQ(extras(1, 1), -2.0);
  EXPECT_EQ(extras(1, 2), std::ldexp(1.0, -24));
  EXPECT_EQ(extras(1, 3), INFINITY);
  EXPECT_EQ(extras(1, 4), -65504.0);
  EXPECT_EQ(extras(2, 1), -3.0);
  EXPECT_EQ(extras(3), -1099511627776.0);
  EXPECT_EQ(extras(4, 1), 255.0);
}

TEST(RegisteredOnTheCpu, AHostFunctionIsCalledInBothPasses) {
  register_score("host.twice", {"score * 2.0F", {}, times_two, two});
  for (const char* implementation : {"cpu.tiled", "cpu.reference"}) {
    Call call("attention b=1 sq=5 sk=9 hq=2 hkv=1 d=16 scale=0.3 score=host.twice");
    Call plain("attention b=1 sq=5 sk=9 hq=2 hkv=1 d=16 scale=0.6");
    for (Call* one : {&call, &plain}) {
      fill_inputs(*one);
      Executor(make_plan(one->problem, Target::cpu(1), Wishes::parse(std::string("implementation=") + implementation)))
          .run(one->bindings);
    }
    for (std::int64_t i = 0; i < call[Slot::o].numel(); ++i) {
      ASSERT_NEAR(call[Slot::o].as<float>()[i], plain[Slot::o].as<float>()[i], 1e-6) << implementation << " " << i;
    }
  }
  Call backward("attention pass=backward b=1 sq=5 sk=9 hq=2 hkv=1 d=16 score=host.twice");
  backward.run();
  register_score("host.without_derivative", {"score * 2.0F", {}, times_two});
  backward.problem.score = "host.without_derivative";
  expect_error([&] { backward.run(); }, ErrorCode::invalid_argument, "score.derivative");
}

// Hides what causal hides, by a score of −∞ whose derivative is NaN.
double causal(double score, const ScorePoint& at, const Extras& /*extras*/, void* /*user*/) {
  return at.key > at.query ? -std::numeric_limits<double>::infinity() : score;
}
double causal_derivative(double /*score*/, const ScorePoint& at, const Extras& /*extras*/, void* /*user*/) {
  return at.key > at.query ? std::numeric_limits<double>::quiet_NaN() : 1.0;
}

TEST(RegisteredOnTheCpu, AScoreOfMinusInfinityHasNoDerivative) {
  register_score("host.causal", {"score", {}, causal, causal_derivative});
  for (const char* implementation : {"cpu.tiled", "cpu.reference"}) {
    Call call("attention pass=backward sq=9 d=16 score=host.causal");
    Call plain("attention pass=backward sq=9 d=16 causal");
    for (Call* one : {&call, &plain}) {
      fill_inputs(*one);
      fill((*one)[Slot::o], 6);
      fill((*one)[Slot::dout], 7);
      fill((*one)[Slot::lse], 8);
      Executor(make_plan(one->problem, Target::cpu(1), Wishes::parse(std::string("implementation=") + implementation)))
          .run(one->bindings);
    }
    for (const Slot slot : {Slot::dq, Slot::dk, Slot::dv}) {
      for (std::int64_t i = 0; i < 9 * 16; ++i) {
        ASSERT_NEAR(call[slot].as<float>()[i], plain[slot].as<float>()[i], 1e-6) << implementation << " " << i;
      }
    }
  }
}

TEST(RegisteredOnTheCpu, AProgramIsWhatAHostFunctionSays) {
  const ExtraTensor bias{"bias", DType::fp32, 2}, ids{"ids", DType::int32, 1};
  register_score("host.distances", {"score + bias(at.head, at.query - at.key + 4)", {bias}, biased, two});
  ScoreText score{"score + bias(at.head, at.query - at.key + 4)", {bias}};
  score.program =
      "score;head;query;key;sub 2 3;const.i 4;add 4 5;load 0 1 6;add 0 7;const.f 0x1p+1;value 8;derivative 9";
  register_score("program.distances", score);
  register_mask("host.same", {"ids(at.query) == ids(at.key)", {ids}, same_document});
  MaskText mask{"ids(at.query) == ids(at.key)", {ids}};
  mask.program = "query;key;load 0 0;load 0 1;eq 2 3;value 4";
  register_mask("program.same", mask);
  const std::string line = "b=1 sq=70 sk=70 hq=2 hkv=1 d=16 score=KIND.distances mask=KIND.same";
  for (const char* pass : {"attention ", "attention pass=backward "}) {
    for (const char* implementation : {"cpu.tiled", "cpu.reference"}) {
      std::vector<std::vector<float>> results;
      for (const std::string kind : {"host", "program"}) {
        std::string text = pass + line;
        for (std::size_t at; (at = text.find("KIND")) != std::string::npos;) text.replace(at, 4, kind);
        Call call(text);
        fill_inputs(call);
        for (const Slot slot : {Slot::o, Slot::dout, Slot::lse}) fill(call[slot], 4);
        fill(call.bind(Slot::extra0, DType::fp32, {2, 90}), 5);
        auto* documents = call.bind(Slot::extra1, DType::int32, {70}).as<std::int32_t>();
        for (std::int32_t i = 0; i < 70; ++i) documents[i] = i / 11;
        Executor(
            make_plan(call.problem, Target::cpu(1), Wishes::parse(std::string("implementation=") + implementation)))
            .run(call.bindings);
        const Tensor& result = call[call.problem.pass == Pass::forward ? Slot::o : Slot::dq];
        results.emplace_back(result.as<float>(), result.as<float>() + result.numel());
      }
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        ASSERT_NEAR(results[0][i], results[1][i], 2e-5 * std::max(1.0F, std::fabs(results[0][i]))) << line << i;
      }
    }
  }
  score.value = biased;
  expect_refused("program.both", score, "program");
  score.value = nullptr;
  score.program = "score;value 1";
  expect_refused("program.wrong", score, "program");
}

TEST(RegisteredOnTheCpu, ExtraTensorsReachHostFunctions) {
  register_score("host.bias", {"score + bias(at.head, at.query - at.key + 4)", {{"bias", DType::fp32, 2}}, biased});
  register_mask("host.documents", {"ids(at.query) == ids(at.key)", {{"ids", DType::int32, 1}}, same_document});
  Call call("attention b=1 sq=6 sk=6 hq=2 d=16 score=host.bias mask=host.documents");
  fill_inputs(call);
  fill(call.bind(Slot::extra0, DType::fp32, {2, 9}), 5);
  call.bind(Slot::extra1, {6}, {3, 3, 3, 8, 8, 8});  // the mask's comes behind the score's
  Call same("attention b=1 sq=6 sk=6 hq=2 d=16 score=mine mask=mine");
  fill_inputs(same);
  const Tensor bias = call[Slot::extra0];
  same.bindings.score = {
      [](double score, const ScorePoint& at, void* user) {
        const auto distance = std::clamp<std::int64_t>(at.query - at.key + 4, 0, 8);
        return score + static_cast<double>(static_cast<const Tensor*>(user)->as<float>()[at.head * 9 + distance]);
      },
      nullptr, const_cast<Tensor*>(&bias)};
  same.bindings.mask = {[](const ScorePoint& at, void*) { return at.query / 3 == at.key / 3; }, nullptr, nullptr};
  call.run();
  same.run();
  EXPECT_EQ(std::memcmp(call[Slot::o].data, same[Slot::o].data, 6 * 2 * 16 * sizeof(float)), 0);
}

TEST(RegisteredOnTheCpu, BoundFunctionsComeFirst) {
  register_score("host.ignored", {"score", {}, times_two});
  Call call("attention b=1 sq=5 d=16 score=host.ignored");
  fill_inputs(call);
  Call plain("attention b=1 sq=5 d=16");
  fill_inputs(plain);
  call.bindings.score.value = [](double score, const ScorePoint&, void*) { return score; };
  call.run();
  plain.run();
  for (std::int64_t i = 0; i < 5 * 16; ++i) {
    EXPECT_NEAR(call[Slot::o].as<float>()[i], plain[Slot::o].as<float>()[i], 1e-6);
  }
}

TEST(RegisteredOnTheCpu, WhatIsMissingIsSaid) {
  register_score("host.none", {"score", {}});
  Call call("attention b=1 sq=5 d=16 score=host.none");
  try {
    call.run();
    ADD_FAILURE() << "computed without a function";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "score");
    EXPECT_NE(error.got().find("has no host function"), std::string::npos) << error.got();
  }
  register_mask("host.ids", {"ids(at.batch, at.key) > 0", {{"ids", DType::int32, 2}}, same_document});
  Call unbound("attention b=1 sq=5 d=16 mask=host.ids");
  expect_error([&] { unbound.run(); }, ErrorCode::invalid_argument, "extra0");
  unbound.bind(Slot::extra0, DType::int64, {1, 5});
  expect_error([&] { unbound.run(); }, ErrorCode::invalid_argument, "extra0");
  unbound.bind(Slot::extra0, DType::int32, {5});
  expect_error([&] { unbound.run(); }, ErrorCode::invalid_argument, "extra0");
  unbound.bind(Slot::extra0, DType::int32, {1, 0});  // nothing to clamp to
  expect_error([&] { unbound.run(); }, ErrorCode::invalid_argument, "extra0");
  unbound.bind(Slot::extra0, DType::int32, {1, 5});
  unbound.bind(Slot::extra1, DType::int32, {5});
  expect_error([&] { unbound.run(); }, ErrorCode::invalid_argument, "extra1");
}

TEST(RegisteredOnTheCpu, FourExtrasForScoreAndMaskTogether) {
  const std::vector<ExtraTensor> three = {{"a"}, {"b"}, {"c"}};
  register_score("host.three", {"score + a(0) + b(0) + c(0)", three});
  register_mask("host.three", {"a(0) < b(0) + c(0)", three});
  expect_error([] { make_plan(Problem::parse("attention sq=5 d=16 score=host.three mask=host.three")); },
               ErrorCode::unsupported, "problem");
  make_plan(Problem::parse("attention sq=5 d=16 score=host.three"));
}

TEST(RegisteredCallables, OnCudaAnUnknownNameTellsHowToRegister) {
  const Support support =
      supports(Problem::parse("attention sq=64 d=64 dtype=bf16 score=cuda.unknown"), Target::cuda(90));
  EXPECT_FALSE(support);
  EXPECT_NE(support.reason.find("cuda.unknown"), std::string::npos) << support.reason;
  EXPECT_NE(support.reason.find("register_score"), std::string::npos) << support.reason;
  register_score("cuda.known", {"score", {}});
  EXPECT_TRUE(supports(Problem::parse("attention sq=64 d=64 dtype=bf16 score=cuda.known"), Target::cuda(90)));
}

TEST(RegisteredCallables, OnCudaABackwardWantsADerivativeText) {
  register_score("cuda.half", {"score * 0.5F", {}});
  const auto backward = [](const char* score, int sm) {
    return supports(Problem::parse(std::string("attention pass=backward sq=64 d=64 dtype=bf16 score=") + score),
                    Target::cuda(sm));
  };
  ScoreText quarter{"score * 0.25F", {}};
  quarter.derivative_text = "0.25F";
  register_score("cuda.quarter", quarter);
  for (const int sm : {80, 90}) {
    const Support support = backward("cuda.half", sm);
    EXPECT_FALSE(support);
    EXPECT_NE(support.reason.find("no derivative of score callable cuda.half"), std::string::npos) << support.reason;
    EXPECT_NE(support.reason.find("derivative_text"), std::string::npos) << support.reason;
    EXPECT_TRUE(backward("cuda.quarter", sm));
    EXPECT_TRUE(backward("soft_clip", sm));
  }
}

}  // namespace
}  // namespace tessera
