// SPDX-License-Identifier: Apache-2.0
// The host side of cuda.linear_chunk: what it refuses, its grids and its parameters, with a stand-in for the driver.
#include <gtest/gtest.h>

#include <cstring>

#include "launch/launch.h"
#include "plan/implementations.h"
#include "shared/linear_chunk.h"

namespace tessera {
namespace {

class LinearChunkLaunch : public Launch {
 protected:
  cuda::ChunkParams params() const {
    cuda::ChunkParams params{};
    std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
    return params;
  }
};

TEST_F(LinearChunkLaunch, ABlockWalksColumnsOfAHead) {
  const Problem problem =
      Problem::parse("linear_chunk b=3 t=200 h=4 d=128 dv=256 dtype=bf16 slots=9 layout=kv scale=2");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  EXPECT_EQ(executor.plan().implementation(), "cuda.linear_chunk_wgmma");
  gpu_.parameter_bytes = 0;  // of the kernel that is looked at only
  executor.prepare();
  Bindings bindings;
  for (const Slot slot : {Slot::q, Slot::k}) bindings[slot] = tensor(DType::bf16, {3, 200, 4, 128});
  for (const Slot slot : {Slot::v, Slot::o}) bindings[slot] = tensor(DType::bf16, {3, 200, 4, 256});
  bindings[Slot::state] = tensor(DType::fp32, {9, 4, 128, 256});
  bindings[Slot::state].strides[0] = std::int64_t{1} << 33;
  bindings[Slot::state_slots] = tensor(DType::int64, {3});
  bindings[Slot::decay_slopes] = tensor(DType::fp32, {4});
  gpu_.parameter_bytes = sizeof(cuda::ChunkParams);
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
  EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{4, 4, 3}));  // 256 columns, 64 at a time
  const cuda::ChunkParams p = params();
  const cuda::ChunkWalk& walk = p.walks[0];
  EXPECT_EQ(walk.x, bindings[Slot::q].data);
  EXPECT_EQ(walk.z, bindings[Slot::v].data);
  EXPECT_EQ(walk.first.strides[0], std::int64_t{1} << 33);
  EXPECT_EQ(walk.first.strides[2], 256);  // a key's row
  EXPECT_EQ(walk.first.strides[3], 1);
  EXPECT_EQ(walk.first.count, 9);
  EXPECT_TRUE(walk.first.long_indices);
  EXPECT_EQ(walk.last.indices, bindings[Slot::state_slots].data);
  EXPECT_TRUE(walk.exact);
  EXPECT_FALSE(walk.backwards);
  EXPECT_EQ(walk.out_scale, 2.0F);
  EXPECT_EQ(walk.y_scale, 1.0F);
  EXPECT_EQ(p.seqlen, 200);
  EXPECT_EQ(p.cu_seqlens, nullptr);
}

TEST_F(LinearChunkLaunch, ThreeWalksOfABackwardInOneLaunchWhereDimsAreEqual) {
  for (const std::int64_t dv : {128, 64}) {
    const Problem problem = Problem::parse(
        "linear_chunk pass=backward b=2 t=90 h=4 d=128 dtype=fp16 varlen tq=150 dv=" + std::to_string(dv));
    Executor executor(make_plan(problem, Target::cuda_device(0)));
    gpu_.parameter_bytes = 0;
    executor.prepare();
    Bindings bindings;
    for (const Slot slot : {Slot::q, Slot::k, Slot::dq, Slot::dk}) bindings[slot] = tensor(DType::fp16, {150, 4, 128});
    for (const Slot slot : {Slot::v, Slot::dv, Slot::dout}) bindings[slot] = tensor(DType::fp16, {150, 4, dv});
    bindings[Slot::decay_slopes] = tensor(DType::fp32, {4});
    bindings[Slot::cu_seqlens_q] = tensor(DType::int32, {3});
    gpu_.parameter_bytes = sizeof(cuda::ChunkParams);
    gpu_.launches = 0;
    executor.run(bindings);
    EXPECT_EQ(gpu_.launches, dv == 128 ? 1 : 2);
    const cuda::ChunkParams p = params();
    EXPECT_EQ(p.cu_seqlens, bindings[Slot::cu_seqlens_q].data);
    EXPECT_EQ(p.total, 150);
    if (dv != 128) continue;
    EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{6, 4, 2}));
    EXPECT_EQ(p.walks[0].out, bindings[Slot::dq].data);
    EXPECT_EQ(p.walks[1].out, bindings[Slot::dv].data);
    EXPECT_EQ(p.walks[2].out, bindings[Slot::dk].data);
    EXPECT_FALSE(p.walks[0].backwards);
    EXPECT_TRUE(p.walks[1].backwards && p.walks[2].backwards);
    EXPECT_EQ(p.walks[0].first.data, nullptr);
  }
}

TEST(LinearChunkPlan, SaysWhatItHasNoKernelFor) {
  const auto reason = [](const char* line, const char* wishes, int sm = 90) {
    return supports(Problem::parse(line), Target::cuda(sm), Wishes::parse(wishes)).reason;
  };
  const auto says = [&](const char* line, const char* wishes, const char* what, int sm = 90) {
    EXPECT_NE(reason(line, wishes, sm).find(what), std::string::npos) << line << ": " << reason(line, wishes, sm);
  };
  says("linear_chunk t=9 d=64", "", "bf16 or fp16");
  says("linear_chunk t=9 d=64 dtype=bf16:bf16:fp16:bf16", "", "of one type");
  says("linear_chunk t=9 d=96 dtype=bf16", "", "head dims of 96; want 64, 128 or 256");
  says("linear_chunk t=9 d=64 dv=32 dtype=bf16", "", "head dims of 32");
  says("linear_chunk b=65536 t=9 d=64 dtype=bf16", "", "at most 65535 sequences");
  says("linear_chunk t=9 d=64 dtype=bf16", "warps=4", "takes the wishes");
  says("linear_chunk t=9 d=64 dtype=bf16", "tile_q=16", "tile_q is 32 or 64");
  says("linear_chunk t=9 d=64 dtype=bf16", "tile_kv=128", "tile_kv is 32 or 64");
  says("linear_chunk t=9 d=64 dtype=bf16", "stages=5", "stages are 2 to 4");
  says("linear_chunk t=9 d=256 dtype=bf16", "tile_kv=64", "tile_kv is 32 where a head dim is 256");
  says("linear_chunk t=9 d=256 dtype=bf16", "", "bytes of shared memory", 120);
  for (const char* line : {"linear_chunk t=9 d=64 dtype=bf16", "linear_chunk t=9 d=128 dv=256 dtype=fp16 slots=3",
                           "linear_chunk pass=backward t=9 d=256 dv=64 dtype=bf16 slots=3 state=bf16 layout=kv"}) {
    EXPECT_EQ(reason(line, ""), "") << line;
    EXPECT_EQ(reason(line, "", 80), "") << line;
  }
}

TEST(LinearChunkPlan, TakesWgmmaOnSm90) {
  const auto kernel = [](const char* wishes, int sm) {
    const Problem problem = Problem::parse("linear_chunk t=900 h=8 d=128 dtype=bf16");
    return make_plan(problem, Target::cuda(sm), Wishes::parse(wishes)).explain();
  };
  EXPECT_NE(kernel("", 90).find("linear_chunk wgmma bf16 x=128 tile=64 chunk=64 stages=3"), std::string::npos);
  EXPECT_NE(
      kernel("implementation=cuda.linear_chunk", 90).find("linear_chunk mma bf16 x=128 tile=64 chunk=64 stages=2"),
      std::string::npos);
  EXPECT_NE(kernel("tile_q=32", 90).find("linear_chunk mma bf16 x=128 tile=64 chunk=32 stages=2"), std::string::npos);
  EXPECT_NE(kernel("", 80).find("linear_chunk mma bf16 x=128 tile=64 chunk=64 stages=2"), std::string::npos);
  EXPECT_NE(kernel("", 120).find("linear_chunk mma bf16 x=128 tile=32 chunk=64 stages=2"), std::string::npos);
}

}  // namespace
}  // namespace tessera
