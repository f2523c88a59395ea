// SPDX-License-Identifier: Apache-2.0
// The host side of cuda.linear_decode: what it refuses, its grid and its parameters, with a stand-in for the driver.
#include <gtest/gtest.h>

#include <cstring>

#include "launch/launch.h"
#include "plan/implementations.h"
#include "shared/linear.h"

namespace tessera {
namespace {

class LinearLaunch : public Launch {
 protected:
  void SetUp() override {
    Launch::SetUp();
    gpu_.parameter_bytes = 0;  // a test that looks at the kernel's own says how many
  }
};

TEST_F(LinearLaunch, TakesABlockForEachPartOfAHead) {
  const Problem problem = Problem::parse("linear_decode b=3 t=2 h=4 d=128 dtype=bf16 slots=9");
  Executor executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("tile_kv=32")));
  EXPECT_EQ(executor.plan().implementation(), "cuda.linear_decode");
  executor.prepare();
  Bindings bindings;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) bindings[slot] = tensor(DType::bf16, {3, 2, 4, 128});
  bindings[Slot::state] = tensor(DType::fp32, {9, 4, 128, 128});
  bindings[Slot::state].strides[0] = std::int64_t{1} << 33;
  bindings[Slot::state_slots] = tensor(DType::int64, {3});
  bindings[Slot::decay_slopes] = tensor(DType::fp32, {4});
  gpu_.parameter_bytes = sizeof(cuda::LinearParams);
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
  EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{4, 4, 3}));
  EXPECT_EQ(gpu_.last.attributes, 1U);
  cuda::LinearParams params{};
  std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
  EXPECT_EQ(params.slot_stride, std::int64_t{1} << 33);
  EXPECT_EQ(params.head_stride, 128 * 128);
  EXPECT_EQ(params.row_stride, 128);
  EXPECT_EQ(params.slots, 9);
  EXPECT_TRUE(params.long_state_slots);
  EXPECT_EQ(params.dest_slots, nullptr);
  EXPECT_EQ(params.tokens, 2);
  EXPECT_FLOAT_EQ(params.scale, 0.0883883476F);
}

// The dims of k in two halves, whose outputs a second kernel adds.
TEST_F(LinearLaunch, TakesHalvesOfKeysWhenWishedFor) {
  const Problem problem = Problem::parse("linear_decode b=3 t=2 h=4 d=128 dtype=bf16 slots=9");
  Executor executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("tile_kv=32 splits=2")));
  EXPECT_EQ(executor.plan().workspace_bytes(), 2U * 3 * 2 * 4 * 128 * 4);
  executor.prepare();
  Bindings bindings;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) bindings[slot] = tensor(DType::bf16, {3, 2, 4, 128});
  bindings[Slot::o].strides[2] = 136;
  bindings[Slot::o].strides[1] = 4 * 136;
  bindings[Slot::o].strides[0] = 2 * 4 * 136;
  bindings[Slot::o].data = tensor(DType::bf16, {3, 2, 4, 136}).data;
  bindings[Slot::state] = tensor(DType::fp32, {9, 4, 128, 128});
  bindings[Slot::decay_slopes] = tensor(DType::fp32, {4});
  bindings[Slot::state_slots] = tensor(DType::int32, {3});
  gpu_.parameter_bytes = sizeof(cuda::LinearSumParams);
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 2);
  EXPECT_EQ(gpu_.last.grid[0], 3U * 2 * 4 * 128 / 256);
  EXPECT_EQ(gpu_.last.block[0], 256U);
  cuda::LinearSumParams sum{};
  std::memcpy(static_cast<void*>(&sum), gpu_.last.parameters.data(), sizeof(sum));
  EXPECT_EQ(sum.o, bindings[Slot::o].data);
  EXPECT_NE(static_cast<const void*>(sum.parts), sum.o);
  EXPECT_EQ(sum.o_strides.head, 136);
  EXPECT_EQ(sum.count, 3 * 2 * 4 * 128);
  EXPECT_EQ(sum.columns.value, 128U);
  EXPECT_EQ(sum.heads.value, 4U);
  EXPECT_EQ(sum.tokens.value, 2U);
}

TEST_F(LinearLaunch, TakesTokensFromARing) {
  const Problem problem = Problem::parse("linear_decode b=3 t=2 h=4 d=128 dtype=bf16 slots=9 ring=6");
  Executor executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("tile_kv=32")));
  executor.prepare();
  Bindings bindings;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) bindings[slot] = tensor(DType::bf16, {3, 2, 4, 128});
  bindings[Slot::state] = tensor(DType::fp32, {9, 4, 128, 128});
  for (const Slot slot : {Slot::ring_k, Slot::ring_v}) bindings[slot] = tensor(DType::bf16, {9, 4, 12, 128});
  bindings[Slot::ring_v].strides[0] = std::int64_t{1} << 34;
  bindings[Slot::ring_cursor] = tensor(DType::int32, {3});
  bindings[Slot::decay_slopes] = tensor(DType::fp32, {4});
  gpu_.parameter_bytes = sizeof(cuda::LinearRingParams);
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
  // q; keys and values of six tokens that wait and two of the step, a row of values 16 bytes longer; weights.
  EXPECT_EQ(gpu_.last.shared_bytes, 2U * 256 + 8 * (256 + 64 + 16) + 2 * 8 * 4);
  cuda::LinearRingParams params{};
  std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
  EXPECT_EQ(params.ring_k_strides.batch, 4 * 12 * 128);
  EXPECT_EQ(params.ring_k_strides.head, 12 * 128);
  EXPECT_EQ(params.ring_k_strides.row, 128);
  EXPECT_EQ(params.ring_v_strides.batch, std::int64_t{1} << 34);
  EXPECT_EQ(params.ring, 6);
  EXPECT_EQ(params.step.tokens, 2);
  EXPECT_EQ(params.step.slots, 9);
}

TEST(LinearPlan, SaysWhatItHasNoKernelFor) {
  const auto reason = [](const char* line, const char* wishes) {
    return supports(Problem::parse(line), Target::cuda(90), Wishes::parse(wishes)).reason;
  };
  EXPECT_NE(reason("linear_decode d=96", "").find("head_dim_qk 96; want 64, 128 or 256"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64 dv=40", "").find("multiple of 32"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64", "tile_kv=12").find("multiple of 8"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64", "warps=3").find("warps are 1, 2, 4 or 8"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64", "stages=2").find("tile_kv"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64", "splits=3").find("splits is 3; want 1 or 2"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64 ring=4", "splits=2").find("want 1 beside a ring"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64 state=bf16 rounding=stochastic", "splits=2").find("rounded by chance"),
            std::string::npos);
  EXPECT_EQ(reason("linear_decode d=64 dv=32", "splits=2"), "");
  EXPECT_NE(reason("linear_decode d=256", "tile_kv=128 warps=1").find("evenly"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64 state=bf16", "tile_kv=64 warps=1").find("evenly"), std::string::npos);
  EXPECT_NE(reason("linear_decode d=64 dv=256 layout=kv", "tile_kv=256 warps=8").find("evenly"), std::string::npos);
  const Support small = supports(Problem::parse("linear_decode t=8 d=256 ring=64 layout=kv"), Target::cuda(89), {});
  EXPECT_NE(small.reason.find("bytes of shared memory"), std::string::npos) << small.reason;
  for (const char* line : {"linear_decode d=64 dv=32", "linear_decode d=64 dv=96 layout=kv",
                           "linear_decode d=128 dv=256", "linear_decode d=256 dv=32 state=bf16",
                           "linear_decode d=256 dv=160 layout=kv", "linear_decode d=64 dv=512 state=bf16 layout=kv"}) {
    EXPECT_EQ(supports(Problem::parse(line), Target::cuda(90)).reason, "") << line;
  }
}

}  // namespace
}  // namespace tessera
