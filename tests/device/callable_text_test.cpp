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
bool same_document(const ScorePoint& at, const Extras& extras, void* /*user*/) {
  return extras(0, at.batch, at.query) == extras(0, at.batch, at.key);
}

void register_texts() {
  register_score("device.relative", {"score - 0.02F * fabsf(static_cast<float>(at.query - at.key))", {}});
  register_score("device.soft_clip",
                 {"const SoftcapParams four(4.0F);\nreturn capped<Softcap::rational>(score, four);", {}});
  register_mask("device.document", {"divide_down(at.query, 40) == divide_down(at.key, 40)", {}});
  register_score("device.bias", {"score * t() + bias(at.head, at.query - at.key + 48)",
                                 {{"bias", DType::fp32, 2}, {"t", DType::fp32, 0}},
                                 biased});
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

  std::vector<std::byte> output_of(const std::string& line) const {
    cases::Inputs inputs(cases::Case::parse(line));
    PlacedRun placed(inputs, make_plan(Problem::parse(line.substr(0, line.find(" seed="))), target_));
    EXPECT_EQ(placed.run(), "");
    return bytes_of(inputs.bindings()[Slot::o]);
  }

  /// Runs the line with a bias of (heads, 2 · kReach + 1), a factor and documents of (batch, positions), in the slots
  /// that its callables give them, and judges by the oracle with the host functions.
  void expect_as_on_the_host(const std::string& line) {
    SCOPED_TRACE(line);
    cases::Inputs inputs(cases::Case::parse(line));
    const Plan plan = make_plan(cases::Case::parse(line).problem, target_);
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
    if (problem.score == "device.bias") {
      extras.bind(next++, DType::fp32, {problem.heads_q, 2 * kReach + 1}, bias);
      extras.bind(next++, DType::fp32, {}, factor);
    }
    if (problem.mask == "device.ids") extras.bind(next++, DType::int32, {problem.batch, positions}, ids);
    PlacedRun placed(inputs, plan);
    extras.put(placed.bindings(), inputs.bindings());
    ASSERT_EQ(placed.run(), "");
    const detail::RegisteredCallables registered(problem);
    const detail::HostCallables host(registered, inputs.bindings());
    const auto oracle = reference::compute(problem, host.bindings(), reference::Arithmetic::oracle);
    EXPECT_EQ(judge(problem, host.bindings(), oracle), "");
  }
};
INSTANTIATE_TEST_SUITE_P(Places, DeviceText, every_place(), name_of_place);

TEST_P(DeviceText, EqualsTheBuiltInBitForBit) {
  if (!is_on_gpu(target_)) GTEST_SKIP() << "texts are for GPUs";
  const std::string line = "attention b=2 sq=150 sk=333 hq=4 hkv=2 d=64 dtype=bf16 causal ";
  for (const auto& [text, builtin] :
       {std::pair("score=device.relative", "score=relative"), std::pair("score=device.soft_clip", "score=soft_clip"),
        std::pair("mask=device.document", "mask=document"),
        std::pair("score=device.relative mask=device.document", "score=relative mask=document")}) {
    EXPECT_EQ(output_of(line + text + " seed=5"), output_of(line + builtin + " seed=5")) << text;
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

TEST_P(DeviceText, HeadAndBatchOffsetsReachTheText) {
  expect_as_on_the_host("attention b=1 sq=60 sk=130 hq=4 d=64 dtype=bf16 score=device.bias head_offset=-2");
}

}  // namespace
}  // namespace tessera::test
