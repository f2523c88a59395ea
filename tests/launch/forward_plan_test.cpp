// SPDX-License-Identifier: Apache-2.0
// What plans of forwards on a GPU choose, whatever computes their products; those of wgmma alone: wgmma_plan_test.cpp.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/launch.h"
#include "plan/implementations.h"

namespace tessera {
namespace {

TEST_F(Launch, BatchInvariantPlansTakeTheSameKernelForEveryBatch) {
  for (const char* rest : {" sq=300 hq=16 d=128 dtype=bf16 causal", " sq=128 hq=16 hkv=8 d=64 dtype=bf16 causal",
                           " sq=2048 hq=2 d=256 dtype=bf16", " sq=2048 hq=2 d=128 dtype=bf16",
                           " sq=300 hq=16 d=128 dtype=bf16 causal compressed_causal=2:2",
                           " sq=90 sk=3000 hq=4 d=128 dtype=bf16 kv=table page=16"}) {
    const auto kernels = [&](int batch) {
      const std::string line = "attention b=" + std::to_string(batch) + rest + " batch_invariant";
      const Plan plan = make_plan(Problem::parse(line), Target::cuda_device(0));
      EXPECT_EQ(plan.state().kernels.size(), 1U) << line;
      return plan.state().kernels.front().text;
    };
    for (const int batch : {2, 16, 300}) EXPECT_EQ(kernels(1), kernels(batch)) << rest << ", b=" << batch;
  }
}

// A residual takes keys from a tile of mma.sync; what is left must be rows that the block's threads copy together.
TEST_F(Launch, TilesWithAResidualAreCopiedInWholeSteps) {
  for (const int sm : {80, 89, 90, 100, 120}) {
    for (const char* d : {"16", "32", "64", "96", "128", "192", "256", "512"}) {
      for (const char* rest : {"bf16:bf16:bf16:bf16", "fp16:fp16:fp16:fp16", "int8:int8:bf16:bf16",
                               "int8:int8:fp16:fp16", "int8:int8:fp16:fp16 descale=block:64 smooth causal",
                               "fp16:fp16:fp16:fp16 chunk=64 causal", "fp16:fp16:fp16:fp16 compressed_causal=4:2"}) {
        if (std::string(d) == "512" && std::string(rest).find("int8") == 0) continue;
        const std::string line = "attention sq=200 sk=300 hq=2 residual d=" + std::string(d) + " dtype=" + rest;
        EXPECT_NO_THROW(make_plan(Problem::parse(line), Target::cuda(sm), Wishes::parse("implementation=cuda.fwd_mma")))
            << line << " sm=" << sm;
      }
    }
  }
}

// A kernel of its own, where it has anything to leave out.
TEST(Metadata, TrustLeavesOutTestsOfPagesAndLists) {
  const auto trusting = [](const std::string& line) {
    std::vector<std::string> names;
    const Problem problem = Problem::parse("attention b=2 sq=200 sk=300 hq=2 d=64 dtype=bf16 " + line);
    const Plan plan = make_plan(problem, Target::cuda(90));
    for (const auto& kernel : plan.state().kernels) {
      if (kernel.name.find(" trusts") != std::string::npos) names.push_back(kernel.name.substr(0, 3));
    }
    return names;
  };
  using Names = std::vector<std::string>;
  for (const std::string line : {"kv=table page=16", "kv=csr page=7", "kv2=csr sk2=90 page2=16",
                                 "block=64x64 list=indices", "block=64x64 list=transposed"}) {
    EXPECT_EQ(trusting(line + " metadata=trust"), Names{"fwd"}) << line;
    for (const char* other : {"", " metadata=report"}) EXPECT_EQ(trusting(line + other), Names{}) << line << other;
  }
  EXPECT_EQ(trusting("metadata=trust seqused_k"), Names{}) << "lengths only";
  EXPECT_EQ(trusting("metadata=trust mass=mean kv=table page=16"), (Names{"fwd", "til"})) << "both read pages";
  EXPECT_EQ(trusting("metadata=trust mass=mean block=64x64 list=indices"), Names{"fwd"}) << "masses test no list";
}

// The list's length and the number of keys do not count.
TEST_F(Launch, SharedMemoryOfAListIsThatOfEveryList) {
  for (const char* implementation : {"cuda.fwd_wgmma", "cuda.fwd_mma"}) {
    Wishes wishes;
    wishes.implementation = implementation;
    const auto bytes = [&](const char* line) {
      return make_plan(Problem::parse(line), Target::cuda(90), wishes).state().kernels.front().shared_bytes;
    };
    EXPECT_EQ(bytes("attention sq=4096 sk=4096 d=128 dtype=bf16 list=indices block=64x64"),
              bytes("attention sq=4096 sk=536870912 d=128 dtype=bf16 list=indices block=64x64"))
        << implementation;
  }
}

}  // namespace
}  // namespace tessera
