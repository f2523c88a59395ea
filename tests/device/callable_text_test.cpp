// SPDX-License-Identifier: Apache-2.0
// Scores and masks as C++ text: against the built-in of the same formula bit for bit, and with extra tensors against
// the oracle with their host functions.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cpu/reference/reference.h"
#include "device/place.h"
#include "problem/registered_callables.h"
#include "tessera/callable.h"

namespace tessera::test {
namespace {

constexpr int kReach = 48;  // the bias table ends before the distances do: what is farther has the last entry's

double biased(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return score * extras(1) + extras(0, at.head, at.query - at.key + kReach);
}
double bias_derivative(double /*score*/, const ScorePoint& /*at*/, const Extras& extras, void* /*user*/) {
  return extras(1);
}
/// A derivative of its own for each batch, head and distance, and by the score.
double gate(const ScorePoint& at, const Extras& extras) {
  return extras(0, at.head, at.query - at.key + kReach) * (1.0 + 0.5 * static_cast<double>(at.batch));
}
double gated(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return gate(at, extras) * score * (1.0 + 0.125 * score) + extras(1);
}
double gate_derivative(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return gate(at, extras) * (1.0 + 0.25 * score);
}
/// A slope of its own for each head.
double linear(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return score + extras(0, at.head, 0) * static_cast<double>(at.key - at.query);
}
double steep(double score, const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return score + 256.0 * extras(0, at.head, 0) * static_cast<double>(at.key - at.query);
}
double derivative_of_linear(double /*score*/, const ScorePoint& /*at*/, const Extras& /*extras*/, void* /*user*/) {
  return 1.0;
}
/// Hides what causal hides, by value, and has no derivative there.
double causal(double score, const ScorePoint& at, const Extras& /*extras*/, void* /*user*/) {
  return at.key > at.query ? -INFINITY : score;
}
double causal_derivative(double /*score*/, const ScorePoint& at, const Extras& /*extras*/, void* /*user*/) {
  return at.key > at.query ? NAN : 1.0;
}
bool same_document(const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return extras(0, at.batch, at.query) == extras(0, at.batch, at.key);
}

void register_texts() {
  register_score("device.relative",
                 {.text = "score - 0.02F * fabsf(static_cast<float>(at.query - at.key))", .derivative_text = "1.0F"});
  for (const auto& [name, distance] : {std::pair("device.wide", "at.query - at.key"),
                                       std::pair("device.narrow", "Position(at.query) - Position(at.key)")}) {
    register_score(name, {.text = "__fmaf_rn(-0.02F, fabsf(static_cast<float>(" + std::string(distance) + ")), score)",
                          .derivative_text = "1.0F"});
  }
  register_score("device.soft_clip",
                 {.text = "const SoftcapParams four(4.0F);\nreturn capped<Softcap::rational>(score, four);",
                  .derivative_text = "capped_derivative(score, SoftcapParams(4.0F))"});
  register_mask("device.document", {"divide_down(at.query, 40) == divide_down(at.key, 40)", {}});
  register_mask("device.narrow_document", {"quotient_down(Position(at.query), Position(40)) == "
                                           "quotient_down(Position(at.key), Position(40))",
                                           {}});
  const std::vector<ExtraTensor> extras = {{"bias", DType::fp32, 2}, {"t", DType::fp32, 0}};
  register_score("device.bias", {.text = "score * t() + bias(at.head, at.query - at.key + 48)",
                                 .extras = extras,
                                 .value = biased,
                                 .derivative = bias_derivative,
                                 .derivative_text = "t()"});
  register_score("device.linear",
                 {.text = "linear_score(score, bias(at.head, 0), Position(at.key) - Position(at.query))",
                  .extras = extras,
                  .value = linear,
                  .derivative = derivative_of_linear,
                  .derivative_text = "1.0F"});
  register_score("device.steep", {.text = "const float slope = 256.0F * bias(at.head, 0);\n"
                                          "return linear_score(score, slope, at.key - at.query);",
                                  .extras = extras,
                                  .value = steep,
                                  .derivative = derivative_of_linear,
                                  .derivative_text = "1.0F"});
  const std::string gate = "const float gate = bias(at.head, at.query - at.key + 48) * (1.0F + 0.5F * at.batch);\n";
  register_score("device.gate", {.text = gate + "return gate * score * (1.0F + 0.125F * score) + t();",
                                 .extras = extras,
                                 .value = gated,
                                 .derivative = gate_derivative,
                                 .derivative_text = gate + "return gate * (1.0F + 0.25F * score);"});
  register_score("device.causal", {.text = "at.key > at.query ? -1.0F / 0.0F : score",
                                   .value = causal,
                                   .derivative = causal_derivative,
                                   .derivative_text = "at.key > at.query ? nanf(\"\") : 1.0F"});
  register_mask("device.ids",
                {"ids(at.batch, at.query) == ids(at.batch, at.key)", {{"ids", DType::int32, 2}}, same_document});
}

/// Extra tensors of a case where its plan runs, and on the host for the oracle.
class PlacedExtras {
 public:
  explicit PlacedExtras(const Target& target) : on_gpu_(is_on_gpu(target)), device_(target.index) {}
  ~PlacedExtras() {
    for (void* memory : memory_) cuda::release(device_, memory);
  }
  PlacedExtras(const PlacedExtras&) = delete;
  PlacedExtras& operator=(const PlacedExtras&) = delete;

  /// `values`: of 4 bytes each.
  template <class Value>
  void bind(int i, DType dtype, std::initializer_list<std::int64_t> shape, std::vector<Value>& values) {
    host_[static_cast<std::size_t>(i)] = Tensor::contiguous(values.data(), dtype, shape);
    Tensor& placed = placed_[static_cast<std::size_t>(i)] = host_[static_cast<std::size_t>(i)];
    if (!on_gpu_) return;
    const std::size_t bytes = values.size() * sizeof(Value);
    placed.device = {DeviceType::cuda, device_};
    placed.data = memory_.emplace_back(cuda::allocate(device_, bytes));
    const cuda::CurrentContext context(device_);
    cuda::check(cuda::driver().copy_to_device(cuda::address(placed.data), values.data(), bytes), "cuMemcpyHtoD");
  }
  void put(Bindings& placed, Bindings& host) const {
    for (int i = 0; i < kMaxExtras; ++i) {
      placed[detail::extra_slot(i)] = placed_[static_cast<std::size_t>(i)];
      host[detail::extra_slot(i)] = host_[static_cast<std::size_t>(i)];
    }
  }

 private:
  bool on_gpu_;
  int device_;
  std::array<Tensor, kMaxExtras> host_, placed_;
  std::vector<void*> memory_;
};

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const auto* begin = tensor.bytes();
  return {begin, begin + static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype)};
}

class DeviceText : public OnPlace {
 protected:
  void SetUp() override {
    OnPlace::SetUp();
    register_texts();
  }

  /// Bytes of o, or of the gradients. `as`: of the line with which o and LSE of a backward are made.
  std::vector<std::byte> output_of(const std::string& line, const std::string& as) const {
    cases::Inputs inputs(cases::Case::parse(as));
    PlacedRun placed(inputs, make_plan(cases::Case::parse(line).problem, target_));
    EXPECT_EQ(placed.run(), "");
    std::vector<std::byte> bytes;
    for (const Slot slot : {Slot::o, Slot::dq, Slot::dk, Slot::dv}) {
      if (!inputs.is_output(slot)) continue;
      const std::vector<std::byte> more = bytes_of(inputs.bindings()[slot]);
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }

  /// For inputs, whose o and LSE of a backward come from the oracle without extra tensors, and are then replaced.
  static cases::Case with_builtins(cases::Case of) {
    if (!of.problem.score.empty()) of.problem.score = "relative";
    if (!of.problem.mask.empty()) of.problem.mask = "document";
    return of;
  }

  /// Runs the line with a bias of (heads, 2 · kReach + 1), a factor and documents of (batch, positions), in the slots
  /// that its callables give them, and judges by the oracle with the host functions.
  void expect_as_on_the_host(const std::string& line) {
    SCOPED_TRACE(line);
    const cases::Case of = cases::Case::parse(line);
    cases::Inputs inputs(with_builtins(of));
    const Plan plan = make_plan(of.problem, target_);
    const Problem& problem = plan.problem();
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> bias(static_cast<std::size_t>(problem.heads_q * (2 * kReach + 1)));
    for (float& value : bias) value = normal(random);
    std::vector<float> factor = {1.25F};
    const std::int64_t positions = problem.kv.seqlen;
    std::vector<int> ids(static_cast<std::size_t>(problem.batch * positions));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int>(i * 7 / 200);
    PlacedExtras extras(target_);
    int next = 0;
    if (!problem.score.empty() && problem.score != "device.causal") {
      extras.bind(next++, DType::fp32, {problem.heads_q, 2 * kReach + 1}, bias);
      extras.bind(next++, DType::fp32, {}, factor);
    }
    if (problem.mask == "device.ids") extras.bind(next++, DType::int32, {problem.batch, positions}, ids);
    PlacedRun placed(inputs, plan);
    extras.put(placed.bindings(), inputs.bindings());
    const detail::RegisteredCallables registered(problem);
    const detail::HostCallables host(registered, inputs.bindings());
    if (problem.pass == Pass::backward) {
      Problem forward = problem;
      forward.pass = Pass::forward;
      forward.lse = true;
      forward.dlse = false;
      reference::store(reference::compute(forward, host.bindings(), reference::Arithmetic::oracle), host.bindings());
    }
    ASSERT_EQ(placed.run(), "");
    const auto oracle = reference::compute(problem, host.bindings(), reference::Arithmetic::oracle);
    EXPECT_EQ(judge(problem, host.bindings(), oracle), "");
  }
};
INSTANTIATE_TEST_SUITE_P(Places, DeviceText, every_place(), name_of_place);

TEST_P(DeviceText, EqualsTheBuiltInBitForBit) {
  if (!is_on_gpu(target_)) GTEST_SKIP() << "texts are for GPUs";
  for (const std::string pass : {"forward", "backward"}) {
    const std::string line = "attention pass=" + pass + " b=2 sq=150 sk=333 hq=4 hkv=2 d=64 dtype=bf16 causal seed=5 ";
    for (const auto& [text, builtin] :
         {std::pair("score=device.relative", "score=relative"), std::pair("score=device.soft_clip", "score=soft_clip"),
          std::pair("mask=device.document", "mask=document"),
          std::pair("score=device.relative mask=device.document", "score=relative mask=document")}) {
      const std::vector<std::byte> want = output_of(line + builtin, line + builtin);
      EXPECT_FALSE(want.empty());
      EXPECT_EQ(output_of(line + text, line + builtin), want) << pass << " " << text;
    }
  }
}

// Two of the four sequences have small positions, one of them by one.
TEST_P(DeviceText, PositionsOfEitherWidthGiveTheSameBits) {
  if (!is_on_gpu(target_)) GTEST_SKIP() << "texts are for GPUs";
  for (const std::string pass : {"forward", "backward"}) {
    const std::string line = "attention pass=" + pass +
                             " b=4 sq=70 sk=90 hq=4 hkv=2 d=64 dtype=bf16 seed=5 "
                             "q_offset=-30,2092985,2092986,8589934600 k_offset=-40,2092970,2092970,8589934570 ";
    const std::string narrow = line + "score=device.narrow mask=device.narrow_document";
    const std::string wide = line + "score=device.wide mask=device.document";
    const std::string builtin = line + "score=relative mask=document";
    EXPECT_EQ(output_of(narrow, builtin), output_of(wide, builtin)) << pass;
    EXPECT_EQ(output_of(builtin, builtin), output_of(wide, builtin)) << pass;
  }
}

TEST_P(DeviceText, ExtraTensorsAsOnTheHost) {
  for (const char* callables : {"score=device.bias", "mask=device.ids", "score=device.bias mask=device.ids"}) {
    const std::string words = std::string(" lse ") + callables;
    expect_as_on_the_host("attention b=2 sq=100 sk=230 hq=4 hkv=2 d=64 dtype=bf16 causal" + words);
    expect_as_on_the_host(
        "attention b=2 sq=70 hq=2 d=128 dtype=fp16 metadata=trust layout=varlen lens_q=70,33 lens_k=70,33" +
        std::string(" lse mask=device.ids"));
    expect_as_on_the_host("attention b=3 sq=1 sk=500 hq=8 hkv=2 d=64 dtype=bf16 kv=table page=16 lens_k=500,7,301" +
                          words);
    expect_as_on_the_host("attention b=2 sq=100 sk=230 hq=4 hkv=2 d=64 dtype=bf16 mass=mean mass_lse=own" + words);
  }
}

// Slopes of both signs, of heads that share a tile of rows; maxima that rise from tile to tile, tiles that masks and
// ends cut, positions of either width, queries far from all keys, slopes of which a row sees but one key, and scales of
// both kinds.
TEST_P(DeviceText, LinearScoresAsOnTheHost) {
  for (const char* score : {"device.linear", "device.steep"}) {
    const std::string words = std::string(" dtype=bf16 lse score=") + score;
    expect_as_on_the_host("attention b=2 sq=150 sk=700 hq=4 hkv=2 d=64" + words);
    expect_as_on_the_host("attention b=2 sq=150 sk=400 hq=4 hkv=2 d=128 causal scale=0.3" + words);
    expect_as_on_the_host("attention b=1 sq=130 sk=400 hq=2 hkv=1 d=64 sink scale=-0.2" + words);
    expect_as_on_the_host(
        "attention b=3 sq=70 sk=300 hq=4 hkv=2 d=64 q_offset=1000000,2092986,8589934600 "
        "k_offset=1000100,2092970,8589934570" +
        words);
    expect_as_on_the_host(
        "attention b=3 sq=70 sk=300 hq=4 hkv=2 d=64 q_offset=1000000000000000000,-300,-8589934600 "
        "k_offset=-20,100,8589934570" +
        words);
    expect_as_on_the_host("attention b=2 sq=128 sk=333 hq=2 hkv=2 d=64 block=64x32 list=bitmask density=0.5" + words);
    expect_as_on_the_host("attention b=2 sq=100 sk=230 hq=4 hkv=2 d=64 mask=device.ids" + words);
    expect_as_on_the_host("attention b=2 sq=70 sk=130 hq=2 d=64 kv2=dense sk2=90" + words);
  }
}

TEST_P(DeviceText, GradientsAsOnTheHost) {
  for (const char* callables : {"score=device.gate", "score=device.bias mask=device.ids", "mask=device.ids"}) {
    const std::string words = std::string(" ") + callables;
    const std::string line = "attention pass=backward b=2 ";
    expect_as_on_the_host(line + "sq=200 sk=230 hq=4 hkv=2 d=64 dtype=bf16 causal" + words);
    expect_as_on_the_host(line + "sq=150 sk=330 hq=2 d=128 dtype=fp16 softcap=2 alibi dlse" + words);
    expect_as_on_the_host(line + "sq=100 sk=130 hq=4 hkv=2 d=256 dtype=bf16 causal sink" + words);
    expect_as_on_the_host(line + "sq=160 sk=160 hq=2 d=96 dtype=bf16 dropout=0.3 drop_seed=4 chunk=90" + words);
    expect_as_on_the_host(line + "sq=200 sk=230 hq=4 hkv=2 d=64 dtype=bf16 block=48x64 list=indices" + words);
  }
  expect_as_on_the_host(
      "attention pass=backward b=2 sq=100 sk=90 hq=2 d=64 dtype=bf16 kv2=dense sk2=70 "
      "q_offset=20,-9 k_offset=7,30 k_offset2=-50,3 score=device.gate");
}

TEST_P(DeviceText, AScoreOfMinusInfinityHasNoDerivative) {
  for (const char* words : {"sq=150 d=64 dtype=bf16", "sq=200 hq=2 d=128 dtype=fp16 window=40:*",
                            "sq=150 sk=170 d=64 dtype=bf16 q_offset=-20"}) {  // rows that see nothing
    expect_as_on_the_host(std::string("attention pass=backward score=device.causal ") + words);
  }
}

TEST_P(DeviceText, HeadAndBatchOffsetsReachTheText) {
  expect_as_on_the_host("attention b=1 sq=60 sk=130 hq=4 d=64 dtype=bf16 score=device.bias head_offset=-2");
  expect_as_on_the_host(
      "attention pass=backward b=1 sq=60 sk=130 hq=4 d=64 dtype=bf16 score=device.gate "
      "head_offset=-2 batch_offset=3");
}

}  // namespace
}  // namespace tessera::test
