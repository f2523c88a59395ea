// SPDX-License-Identifier: Apache-2.0
// Kernels around users' texts: their sources, and what the real compiler says of them, where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "core/expect_error.h"
#include "cuda/jit/compile.h"
#include "plan/implementations.h"
#include "tessera/callable.h"
#include "tessera/cuda.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

std::vector<cuda::KernelSource> sources_of(const std::string& problem, int sm = 90) {
  const Plan plan = make_plan(Problem::parse(problem), Target::cuda(sm));
  EXPECT_FALSE(plan.state().kernels.empty()) << problem;
  return plan.state().kernels;
}
cuda::KernelSource source_of(const std::string& problem, int sm = 90) { return sources_of(problem, sm).front(); }

constexpr const char* kLine = "attention b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16 ";

ScoreText with_derivative(ScoreText text, std::string derivative) {
  text.derivative_text = std::move(derivative);
  return text;
}

TEST(CallableText, IsInTheSourceWithLinesOfItsOwn) {
  register_score("jit.bias", {"score + bias(at.head, at.query - at.key)", {{"bias", DType::fp16, 2}}});
  register_mask("jit.ids", {"// return is no word of code here\nconst auto id = ids(at.key);\nreturn id == at.head;",
                            {{"ids", DType::uint8, 1}}});
  const cuda::KernelSource source = source_of(kLine + std::string("score=jit.bias mask=jit.ids"));
  EXPECT_TRUE(contains(source.name, " score=jit.bias mask=jit.ids")) << source.name;
  EXPECT_EQ(source.user_texts, (std::vector<std::string>{"score jit.bias", "mask jit.ids"}));
  EXPECT_TRUE(contains(source.text, "return (\n#line 1 \"score jit.bias\"\nscore + bias(at.head, at.query - at.key)\n"))
      << source.text;
  EXPECT_TRUE(contains(source.text, "#line 1 \"mask jit.ids\"\n// return is")) << source.text;
  EXPECT_TRUE(contains(source.text, "ExtraTensor<ExtraType::fp16, 2> bias{extras[0]};")) << source.text;
  EXPECT_TRUE(contains(source.text, "ExtraTensor<ExtraType::uint8, 1> ids{extras[1]};")) << source.text;
  EXPECT_TRUE(contains(source.text, "Callables<TextScore, TextMask>")) << source.text;
}

TEST(CallableText, AMaskThatDoesNotAskForTheHeadIsInAKernelInFront) {
  register_mask("jit.shared", {"at.key <= at.query", {}});
  register_mask("jit.apart", {"at.key <= at.query + at.head", {}});
  for (const char* words : {"", " list=indices:1:1:full block=128x128", " pass=backward"}) {
    const std::string line = kLine + std::string("mask=jit.shared") + words;
    int kernels = 0;
    for (const cuda::KernelSource& source : sources_of(line)) kernels += source.name.starts_with("mark_mask") ? 1 : 0;
    EXPECT_EQ(kernels, 1) << line;
    const std::string apart = kLine + std::string("mask=jit.apart") + words;
    for (const cuda::KernelSource& source : sources_of(apart))
      EXPECT_FALSE(source.name.starts_with("mark_mask")) << apart;
  }
  int number = 0;
  for (const char* text :
       {"at.key < 4'096 || at.head == 0", "const auto [b, h, q, k] = at; return h == 0 || k <= q;"}) {
    const std::string name = "jit.reads" + std::to_string(number++);
    register_mask(name, {text, {}});
    for (const cuda::KernelSource& source : sources_of(kLine + ("mask=" + name))) {
      EXPECT_FALSE(source.name.starts_with("mark_mask")) << text;
    }
  }
  const auto forward = sources_of(kLine + std::string("mask=jit.shared"));
  EXPECT_FALSE(contains(forward.front().text, "TextMask")) << forward.front().text;
  EXPECT_TRUE(contains(forward.back().text, "#line 1 \"mask jit.shared\"\nat.key <= at.query")) << forward.back().text;
  EXPECT_EQ(forward.back().user_texts, (std::vector<std::string>{"mask jit.shared"}));
}

TEST(CallableText, AnExpressionMayTalkOfReturning) {
  register_score("jit.comment", {"score /* return */ * 2.0F // return\n", {}});
  EXPECT_TRUE(contains(source_of(kLine + std::string("score=jit.comment")).text, "return (\n#line 1"));
  register_score("jit.word", {"score + returned(0)", {{"returned", DType::fp32, 1}}});
  EXPECT_TRUE(contains(source_of(kLine + std::string("score=jit.word")).text, "return (\n#line 1"));
}

TEST(CallableText, OnlyTextsWithPositionsOfTwoWidthsAreCompiledTwice) {
  register_score("jit.wide", {"score /* Position */ + at.query", {}});
  register_score("jit.narrow", with_derivative({"score * at.head", {}}, "Position(at.head)"));
  register_mask("jit.narrow", {"Position(at.key) > 3", {}});
  const auto uses = [](const std::string& line) {
    return contains(source_of(line).text, "static constexpr bool uses_position = true;");
  };
  EXPECT_FALSE(uses(kLine + std::string("score=jit.wide")));
  const auto of_mask = sources_of(kLine + std::string("mask=jit.narrow"));
  EXPECT_TRUE(std::ranges::any_of(of_mask, [](const auto& source) {
    return contains(source.text, "static constexpr bool uses_position = true;");
  }));
  EXPECT_FALSE(uses(kLine + std::string("score=jit.narrow")));
  const auto sources = sources_of("attention pass=backward sq=300 hq=4 d=64 dtype=bf16 score=jit.narrow");
  EXPECT_TRUE(std::ranges::any_of(sources, [](const auto& source) {
    return contains(source.text, "static constexpr bool uses_position = true;");
  }));
}

TEST(CallableText, EveryKernelOfThePlanThatScoresHasIt) {
  register_mask("jit.odd", {"(at.key & 1) != 0", {}});
  const auto sources = sources_of(kLine + std::string("mask=jit.odd mass=mean"));
  EXPECT_EQ(std::count_if(sources.begin(), sources.end(),
                          [](const auto& source) { return contains(source.text, "(at.key & 1) != 0"); }),
            2);
}

TEST(CallableText, ABackwardHasTheDerivativeToo) {
  register_score("jit.gate", with_derivative({"score * gate(at.key) + at.head", {{"gate", DType::fp32, 1}}},
                                             "const float slope = gate(at.key);\nreturn slope;"));
  const std::string words = "sq=300 hq=4 hkv=2 d=64 dtype=bf16 score=jit.gate";
  EXPECT_FALSE(contains(source_of("attention " + words).text, "float derivative("));
  for (const int sm : {80, 90}) {
    const auto sources = sources_of("attention pass=backward " + words, sm);
    int passes = 0;
    for (const cuda::KernelSource& source : sources) {
      if (!contains(source.text, "struct TextScore")) continue;
      ++passes;
      EXPECT_TRUE(contains(source.name, " score=jit.gate")) << source.name;
      EXPECT_TRUE(contains(source.text, ".user_score = true")) << source.text;
      EXPECT_TRUE(contains(source.text, "#line 1 \"score jit.gate\"\nscore * gate(at.key)")) << source.text;
      EXPECT_TRUE(contains(source.text, "#line 1 \"derivative of score jit.gate\"\nconst float slope")) << source.text;
      EXPECT_EQ(source.user_texts, (std::vector<std::string>{"derivative of score jit.gate", "score jit.gate"}));
    }
    EXPECT_EQ(passes, sm == 80 ? 2 : 1) << sm;  // by rows and by keys, or both at once
  }
}

// AddressSanitizer's dlopen does not look beside NVRTC for NVRTC's own builtins.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kBuiltinsAreFound = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr bool kBuiltinsAreFound = false;
#else
constexpr bool kBuiltinsAreFound = true;
#endif
#else
constexpr bool kBuiltinsAreFound = true;
#endif

/// The compiler that scripts/kernels uses, if it was fetched or TESSERA_NVRTC leads to one.
class CompiledText : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kBuiltinsAreFound) GTEST_SKIP() << "NVRTC does not find its builtins under AddressSanitizer";
    const std::string folder = std::string(TESSERA_SOURCE_DIR) + "/build/nvrtc";
    if (std::filesystem::exists(folder)) cuda::set_nvrtc(folder);
    try {
      cuda::compiler();
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  void TearDown() override { cuda::set_nvrtc(""); }

  static cuda::Compiled compile(const std::string& callables, int sm) {
    return cuda::compile(source_of(kLine + callables, sm), cuda::architecture(sm));
  }
  /// The error of a score that is wrong in itself.
  static std::string refusal(const std::string& name, const ScoreText& text) {
    register_score(name, text);
    try {
      compile("score=" + name, 80);
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.code()), to_string(ErrorCode::invalid_argument)) << error.what();
      EXPECT_EQ(error.argument(), "score " + name);
      EXPECT_TRUE(contains(error.want(), "C++ text that compiles for sm_80")) << error.want();
      return error.got();
    }
    ADD_FAILURE() << name << " compiled";
    return "";
  }
};

TEST_F(CompiledText, WithAndWithoutExtraTensorsInRegistersAlone) {
  register_score("nvrtc.plain", {"score - 0.02F * fabsf(static_cast<float>(at.query - at.key))", {}});
  register_score("nvrtc.body", {"const float x = score * t();\nif (at.head == 1) return x;\nreturn x + b(at.batch, "
                                "at.head, at.key) + h(at.head, at.query - at.key) + tanhf(x);",
                                {{"t", DType::fp32, 0}, {"b", DType::bf16, 3}, {"h", DType::fp16, 2}}});
  register_mask("nvrtc.ids", {"ids(at.batch, at.query) == ids(at.batch, at.key)", {{"ids", DType::int64, 2}}});
  register_mask("nvrtc.bytes", {"seen(at.key)", {{"seen", DType::uint8, 1}}});
  // As python/tessera/expressions writes them.
  register_score("nvrtc.slopes", {"const Position v0 = Position(at.query);\nconst Position v1 = Position(at.key);\n"
                                  "return score + slopes(Position(at.head)) * float_of_small(minus(v1, v0));",
                                  {{"slopes", DType::fp32, 1}}});
  register_mask("nvrtc.rows", {"quotient_of_raised<174763>(Position(at.query), Position(12)) == "
                               "remainder_of_raised<174763>(Position(at.key), Position(12))",
                               {}});
  for (const int sm : {80, 90}) {
    for (const char* callables : {"score=nvrtc.plain", "mask=nvrtc.bytes causal", "score=nvrtc.body mask=nvrtc.ids",
                                  "score=nvrtc.slopes mask=nvrtc.rows"}) {
      const cuda::Compiled compiled = compile(callables, sm);
      EXPECT_EQ(compiled.spill_bytes, 0) << callables << " on " << sm;
      EXPECT_EQ(cuda::warnings(compiled.log), std::vector<std::string>()) << callables;
    }
  }
}

TEST_F(CompiledText, BackwardsInRegistersAlone) {
  register_score("nvrtc.gate", with_derivative({"score * b(at.batch, at.head, at.key) + h(at.head, at.query - at.key)",
                                                {{"b", DType::bf16, 3}, {"h", DType::fp16, 2}}},
                                               "const float slope = b(at.batch, at.head, at.key);\nreturn slope;"));
  register_mask("nvrtc.ids_of_rows", {"ids(Position(at.query)) == ids(Position(at.key))", {{"ids", DType::int32, 1}}});
  register_score("nvrtc.narrow_gate",
                 with_derivative({"score * b(at.batch, at.head, Position(at.key)) + h(at.head, Position(at.query) - "
                                  "Position(at.key))",
                                  {{"b", DType::bf16, 3}, {"h", DType::fp16, 2}}},
                                 "const float slope = b(at.batch, at.head, Position(at.key));\nreturn slope;"));
  for (const int sm : {80, 90}) {
    for (const char* words :
         {"d=128 softcap=20 alibi causal score=nvrtc.gate", "d=64 mask=nvrtc.ids_of_rows score=nvrtc.gate",
          "d=64 mask=nvrtc.ids_of_rows score=nvrtc.narrow_gate"}) {
      const std::string problem = "attention pass=backward sq=300 hq=4 dtype=bf16 ";
      for (const cuda::KernelSource& source : sources_of(problem + words, sm)) {
        const cuda::Compiled compiled = cuda::compile(source, cuda::architecture(sm));
        EXPECT_EQ(compiled.spill_bytes, 0) << source.name << " on " << sm;
        EXPECT_EQ(cuda::warnings(compiled.log), std::vector<std::string>()) << source.name;
      }
    }
  }
}

TEST_F(CompiledText, ErrorsOfADerivativeAreItsOwn) {
  register_score("nvrtc.slope", with_derivative({"score * 2.0F", {}}, "\nnonsense"));
  const cuda::KernelSource source =
      sources_of("attention pass=backward sq=300 dtype=bf16 score=nvrtc.slope", 80).back();
  try {
    cuda::compile(source, "sm_80");
    ADD_FAILURE() << "compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "derivative of score nvrtc.slope");
    EXPECT_TRUE(contains(error.got(), "derivative of score nvrtc.slope(2): error")) << error.got();
  }
}

TEST_F(CompiledText, ErrorsCountLinesOfTheText) {
  const std::string unknown =
      refusal("nvrtc.unknown", {"const float x = score;\n\nreturn x + bais(at.key);", {{"bias", DType::fp32, 1}}});
  EXPECT_TRUE(contains(unknown, "score nvrtc.unknown(3): error")) << unknown;
  EXPECT_TRUE(contains(unknown, "bais")) << unknown;
  const std::string open = refusal("nvrtc.open", {"score * (2.0F", {}});
  EXPECT_TRUE(contains(open, "score nvrtc.open(")) << open;
  const std::string rank = refusal("nvrtc.rank", {"score + bias(at.key, 0)", {{"bias", DType::fp32, 1}}});
  EXPECT_TRUE(contains(rank, "as many indices as it has dimensions")) << rank;
}

TEST_F(CompiledText, ErrorsOfOtherSourcesStayOurs) {
  cuda::KernelSource source = source_of("attention sq=64 d=64 dtype=bf16");
  source.text += "nonsense\n";
  expect_error([&] { cuda::compile(source, "sm_80"); }, ErrorCode::internal, "kernel " + source.name + " for sm_80");
}

}  // namespace
}  // namespace tessera
