// SPDX-License-Identifier: Apache-2.0
// The host side of the backward on a GPU: what its plans choose and refuse, its launches, parameters and workspace.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "core/expect_error.h"
#include "cuda/attention/backward/config.h"
#include "launch/backward.h"
#include "plan/implementations.h"
#include "shared/backward.h"
#include "tessera/callable.h"

namespace tessera {
namespace {

using cuda::BwdConfig;
using cuda::BwdParams;
using cuda::Gradients;
using cuda::Products;

TEST_F(Backward, ThreeKernelsAndAFourthForSinks) {
  const struct {
    const char* implementation;
    const char* words;
    Products products;
    Gradients of;  // the last pass over scores
  } forms[] = {{"cuda.bwd_mma", " softcap=30", Products::mma_sync, Gradients::keys},
               {"cuda.bwd_mma", "", Products::mma_sync, Gradients::all},
               {"cuda.bwd_wgmma", " dv=192", Products::wgmma, Gradients::keys},
               {"cuda.bwd_wgmma", "", Products::wgmma, Gradients::all}};
  for (const auto& [implementation, words, products, of] : forms) {
    for (const bool sink : {false, true}) {
      const Problem problem = Problem::parse(std::string("attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 d=64 "
                                                         "dtype=bf16 causal") +
                                             words + (sink ? " sink" : ""));
      Wishes wishes;
      wishes.implementation = implementation;
      const Plan plan = make_plan(problem, Target::cuda_device(0), wishes);
      EXPECT_EQ(plan.implementation(), implementation);
      EXPECT_EQ(plan.state().kernels.size(), sink ? 4U : 3U);
      gpu_.launches = 0;
      Executor(plan).run(dense(problem));
      EXPECT_EQ(gpu_.launches, sink ? 4 : 3);
      EXPECT_EQ(gpu_.last.attributes, 1U);  // it may begin before the kernel in front has ended
      const BwdConfig keys = cuda::bwd_config(problem, plan.target(), products, of);
      const auto blocks = static_cast<unsigned>(cuda::divide_up(200, keys.tile_kv) * problem.heads_kv * problem.batch);
      const bool all = of == Gradients::all;
      EXPECT_EQ(gpu_.last.grid[0], sink ? static_cast<unsigned>(problem.heads_q) : all ? 5U : blocks);
      EXPECT_EQ(gpu_.last.block[0], sink || all ? 256U : static_cast<unsigned>(keys.block_threads()));
      const std::size_t rows = 2 * 4 * 300 * sizeof(float);
      const std::size_t sums = all ? 2 * 4 * 5 * 64 * 64 * sizeof(float) : 0;
      if (sink) {
        EXPECT_GT(plan.workspace_bytes(), sums + 3 * rows);
      } else {
        EXPECT_EQ(plan.workspace_bytes(), sums + 2 * rows);
      }
    }
  }
}

// Of V, or dO, one tile is enough where that makes tiles longer, or lets Q have a second stage; not where a mask or a
// score wants the registers of longer tiles.
TEST_F(Backward, OneStageOfValues) {
  const struct {
    int sm;
    const char* words;
    Products products;
    Gradients of;
    bool single;
    int stream_rows, stages;
  } tiles[] = {
      {90, "d=256", Products::wgmma, Gradients::queries, true, 64, 2},
      {90, "d=256", Products::wgmma, Gradients::keys, false, 64, 2},
      {90, "d=256 list=indices block=128x128", Products::wgmma, Gradients::queries, true, 64, 2},
      {90, "d=256 list=indices block=128x32", Products::wgmma, Gradients::queries, false, 32, 3},
      {90, "d=256 dropout=0.5", Products::wgmma, Gradients::queries, false, 32, 3},
      {90, "d=256 kv2=dense sk2=70", Products::wgmma, Gradients::queries, false, 48, 2},
      {90, "d=192", Products::wgmma, Gradients::queries, true, 96, 2},
      {90, "d=192 dv=256", Products::wgmma, Gradients::queries, false, 64, 2},
      {90, "d=128 deterministic list=indices block=128x128", Products::wgmma, Gradients::queries, false, 64, 4},
      {80, "d=128", Products::mma_sync, Gradients::all, false, 64, 2},
      {80, "d=192", Products::mma_sync, Gradients::all, true, 64, 2},
      {80, "d=256", Products::mma_sync, Gradients::all, false, 64, 1},
      {89, "d=96", Products::mma_sync, Gradients::all, false, 64, 2},
      {89, "d=128", Products::mma_sync, Gradients::all, true, 64, 2}};
  for (const auto& [sm, words, products, of, single, stream_rows, stages] : tiles) {
    const Problem problem = Problem::parse(std::string("attention pass=backward sq=400 hq=2 dtype=bf16 ") + words);
    const BwdConfig config = cuda::bwd_config(problem, Target::emulate(sm, 0), products, of);
    EXPECT_EQ(config.single_ov, single) << sm << ' ' << words;
    EXPECT_EQ(config.stream_rows(), stream_rows) << sm << ' ' << words;
    EXPECT_EQ(config.stages, stages) << sm << ' ' << words;
    EXPECT_FALSE(config.list_elements) << sm << ' ' << words;
  }
}

// The pass by keys adds dQ up where the registers of plain scores are enough; in a fixed order where the problem wants
// one, and then without lists.
TEST_F(Backward, FindsAllGradientsInOnePass) {
  const auto kernels = [](const char* words, int sm = 90) {
    const std::string line = std::string("attention pass=backward sq=300 hq=2 dtype=bf16 ") + words;
    const Plan plan = make_plan(Problem::parse(line), Target::emulate(sm, 0));
    std::string names;
    for (const auto& kernel : plan.state().kernels) names += kernel.name + "; ";
    return names;
  };
  for (const char* words : {"d=128", "d=64 causal", "d=120 dv=64 sink window=100:0", "d=96", "d=72 dv=128",
                            "d=128 alibi", "d=96 softcap=30", "d=128 dropout=0.1", "d=96 softcap=30 dropout=0.1",
                            "d=96 dropout=0.1 list=indices block=128x128"}) {
    EXPECT_NE(kernels(words).find("bwd_wgmma dqkv"), std::string::npos) << kernels(words);
  }
  for (const char* words : {"d=128 deterministic", "d=64 batch_invariant causal"}) {
    EXPECT_NE(kernels(words).find("dqkv"), std::string::npos) << kernels(words);
    EXPECT_NE(kernels(words).find("ordered"), std::string::npos) << kernels(words);
  }
  EXPECT_EQ(kernels("d=128").find("ordered"), std::string::npos);
  // By mma.sync in any order only, by the largest tiles that fit and that blocks of a list do not cut.
  const struct {
    const char* words;
    int sm;
    const char* kernel;
  } tiles[] = {{"d=64 causal", 80, "d=64:64 tile=128x128"},
               {"d=64 alibi", 80, "d=64:64 tile=64x128"},
               {"d=64", 120, "d=64:64 tile=64x128"},
               {"d=64 list=indices block=64x64", 80, "d=64:64 tile=64x64"},
               {"d=96 list=indices block=128x128", 80, "d=96:96 tile=64x128"},
               {"d=96", 120, "d=96:96 tile=64x64"},
               {"d=128", 80, "d=128:128 tile=64x128"},
               {"d=128 alibi list=indices block=128x128", 80, "d=128:128 tile=64x64"},
               {"d=128", 120, "d=128:128 tile=64x64"},
               {"d=64 dv=256 sink", 80, "d=64:256 tile=64x64"},
               {"d=256", 80, "d=256:256 tile=64x64"}};
  for (const auto& [words, sm, kernel] : tiles) {
    EXPECT_NE(kernels(words, sm).find(std::string("bwd_mma dqkv bf16 ") + kernel), std::string::npos)
        << kernels(words, sm);
  }
  EXPECT_EQ(kernels("d=256", 120).find("dqkv"), std::string::npos) << kernels("d=256", 120);
  for (const char* words :
       {"d=128 deterministic", "d=64 softcap=30", "d=64 dropout=0.1", "d=64 alibi list=indices block=16x16"}) {
    EXPECT_EQ(kernels(words, 80).find("dqkv"), std::string::npos) << kernels(words, 80);
  }
  for (const char* words :
       {"d=128 deterministic list=indices block=128x128", "d=32", "d=256", "d=64 dv=192", "d=128 softcap=30",
        "d=128 softcap=30 dropout=0.1", "d=128 dropout=0.1 list=indices block=128x128", "d=64 kv2=dense sk2=9"}) {
    EXPECT_EQ(kernels(words).find("dqkv"), std::string::npos) << kernels(words);
  }
}

// Above 128 columns dK and dV belong to warpgroups of their own, which share 64 keys; under a softcap to blocks.
TEST_F(Backward, GradientsOfWideKeysAndValuesArePartedByRoles) {
  const struct {
    const char* words;
    bool roles, apart;
    unsigned key_tiles;  // of 200 keys
  } all[] = {{"d=128 softcap=30", false, false, 2},
             {"d=192", true, false, 4},
             {"d=256", true, false, 4},
             {"d=64 dv=192", true, false, 4},
             {"d=256 dropout=0.1", true, false, 4},
             {"d=256 softcap=30", false, true, 2}};
  for (const auto& [words, roles, apart, key_tiles] : all) {
    const Problem problem = Problem::parse(
        std::string("attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 dtype=bf16 deterministic ") + words);
    const Plan plan = make_plan(problem, Target::cuda_device(0));
    const BwdConfig keys = cuda::bwd_config(problem, plan.target(), Products::wgmma, Gradients::keys);
    EXPECT_EQ(keys.roles, roles) << words;
    EXPECT_EQ(keys.apart, apart) << words;
    EXPECT_LE(keys.smem_bytes(), plan.target().shared_memory) << words;
    Executor(plan).run(dense(problem));
    EXPECT_EQ(gpu_.last.grid[0], 2U * 2 * key_tiles * (apart ? 2 : 1)) << words;
  }
}

TEST_F(Backward, PromisesTheSameBitsOnlyInSumsOfAFixedOrder) {
  const auto explained = [](const char* words) {
    const std::string line = std::string("attention pass=backward sq=300 hq=2 d=64 dtype=bf16 ") + words;
    return make_plan(Problem::parse(line), Target::emulate(90, 0)).explain();
  };
  EXPECT_NE(explained("deterministic").find("promises:       the same bits in every run\n"), std::string::npos);
  EXPECT_NE(explained("batch_invariant").find("the same bits in every run, and whatever shares"), std::string::npos);
  EXPECT_NE(explained("").find("promises:       not the same bits in every run"), std::string::npos) << explained("");
}

TEST_F(Backward, ByWarpgroupsOnSm90) {
  const auto implementation = [](int sm, const char* dims) {
    const std::string line = std::string("attention pass=backward sq=300 hq=2 dtype=bf16 ") + dims;
    return std::string(make_plan(Problem::parse(line), Target::emulate(sm, 0)).implementation());
  };
  EXPECT_EQ(implementation(90, "d=128"), "cuda.bwd_wgmma");
  EXPECT_EQ(implementation(90, "d=64 dv=192"), "cuda.bwd_wgmma");
  EXPECT_EQ(implementation(90, "d=256 softcap=30 dropout=0.1"), "cuda.bwd_wgmma");
  for (const int sm : {80, 89, 120}) EXPECT_EQ(implementation(sm, "d=128"), "cuda.bwd_mma");
}

// A loss that is a sum has a gradient of one element for all.
TEST_F(Backward, StridesThatTmaCannotWalkAreRefused) {
  const Problem problem = Problem::parse("attention pass=backward sq=200 sk=200 hq=2 d=64 dtype=bf16");
  Bindings bindings = dense(problem);
  bindings[Slot::dout].strides[1] = 0;
  expect_error([&] { Executor(make_plan(problem, Target::cuda_device(0))).run(bindings); }, ErrorCode::unsupported,
               "dout");
}

TEST_F(Backward, WhatTheKernelsAreGiven) {
  const Problem problem = Problem::parse(
      "attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 d=128 dv=64 dtype=bf16 kv2=dense sk2=70 dlse grad=fp32 "
      "accumulate sink");
  const Bindings bindings = dense(problem);
  Executor(make_plan(problem, Target::cuda_device(0))).run(bindings);
  const BwdParams p = params();
  EXPECT_EQ(p.dout, bindings[Slot::dout].data);
  EXPECT_EQ(p.dlse, bindings[Slot::dlse].data);
  EXPECT_EQ(p.dq, bindings[Slot::dq].data);
  EXPECT_EQ(p.dk[0].data, bindings[Slot::dk].data);
  EXPECT_EQ(p.dv[0].data, bindings[Slot::dv].data);
  EXPECT_EQ(p.dk[1].data, bindings[Slot::dk2].data);
  EXPECT_EQ(p.dv[1].data, bindings[Slot::dv2].data);
  EXPECT_EQ(p.dv[1].strides.row, 2 * 64);
  EXPECT_EQ(p.dsink, bindings[Slot::dsink].data);
  EXPECT_TRUE(p.accumulates);
  EXPECT_EQ(p.forward.group.value, 1U);
  EXPECT_EQ(p.forward.heads_a_kv.value, 2U);
  EXPECT_EQ(p.values.rows, 600);
  EXPECT_EQ(p.values.delta - p.values.lse, 4 * 600);
  EXPECT_EQ(p.values.weight - p.values.delta, 4 * 600);
  EXPECT_EQ(p.dsink_parts - p.values.weight, 4 * 600);
}

// Key heads of eight blocks each, whose rows and sums are 8 or 16 MiB a head: two or one of them in L2, 16 in a wave.
// With a fixed order of sums some number in between, fewer where all rows see all keys.
TEST_F(Backward, HeadsOfAWaveRunSideBySide) {
  const auto together = [&](const std::string& words, unsigned tiles = 8) {
    const Problem problem = Problem::parse("attention pass=backward sq=1024 d=64 dtype=bf16 " + words);
    Executor(make_plan(problem, Target::cuda_device(0))).run(dense(problem));
    EXPECT_EQ(params().key_l2_blocks.value, tiles * params().key_l2_heads.value);
    return params().key_l2_heads.value;
  };
  EXPECT_EQ(together("hq=256 hkv=16 causal"), 16U);
  EXPECT_EQ(together("hq=256 hkv=16 deterministic"), 8U);  // of 16 only 4 and 8 are near, one as the other
  EXPECT_EQ(together("hq=512 hkv=16 causal deterministic"), 8U);
  EXPECT_EQ(together("hq=512 hkv=16 window=100:100 batch_invariant"), 8U);
  EXPECT_EQ(together("hq=512 hkv=16 deterministic"), 4U);
  EXPECT_EQ(together("hq=224 hkv=7 causal deterministic"), 7U);
  EXPECT_EQ(together("sk=16896 hq=128 hkv=4 deterministic", 132), 2U);  // two waves, no more
  EXPECT_EQ(together("sk=16896 hq=128 hkv=4 causal deterministic", 132), 4U);
}

// Of sums of dQ in a fixed order each tile of 64 rows has a count behind them; counts begin at zero instead of sums.
TEST_F(Backward, CountsOfSumsInAFixedOrder) {
  const auto given = [&](const std::string& words) {
    const Problem problem =
        Problem::parse("attention pass=backward b=2 sq=300 sk=200 hq=4 hkv=2 d=96 dtype=bf16 " + words);
    const Plan plan = make_plan(problem, Target::cuda_device(0));
    Executor(plan).run(dense(problem));
    return std::pair{params(), plan.workspace_bytes()};
  };
  const auto [p, bytes] = given("deterministic");
  const auto [free_order, fewer_bytes] = given("");
  EXPECT_EQ(p.query_sums.head_tiles, 2 * 5);
  ASSERT_NE(p.query_sums.added, nullptr);
  EXPECT_EQ(static_cast<const void*>(p.query_sums.added),
            static_cast<const void*>(p.query_sums.data + 4 * 2 * 5 * 64 * 96));
  EXPECT_EQ(static_cast<const void*>(p.values.lse), static_cast<const void*>(p.query_sums.added + 4 * 2 * 5));
  EXPECT_EQ(free_order.query_sums.added, nullptr);
  EXPECT_EQ(bytes - fewer_bytes, 4 * 2 * 5 * 4U);
  const Problem problem = Problem::parse("attention pass=backward sq=300 d=96 dv=128 dtype=bf16 batch_invariant");
  const auto row_values = [](const Problem& of) {
    return cuda::row_values_config(of, cuda::bwd_config(of, Target::emulate(90, 0), Products::wgmma, Gradients::all));
  };
  const cuda::RowValuesConfig ordered = row_values(problem);
  EXPECT_TRUE(ordered.counts_sums && ordered.cleared_rows == 0);
  const Problem any_order = Problem::parse("attention pass=backward sq=300 d=96 dv=128 dtype=bf16");
  EXPECT_EQ(row_values(any_order).cleared_rows, 64);
}

// Keys that no query sees still have gradients: zeros.
TEST_F(Backward, NoQueriesLeaveZeros) {
  const Problem problem = Problem::parse("attention pass=backward sq=0 sk=200 hq=2 d=64 dtype=bf16");
  Executor(make_plan(problem, Target::cuda_device(0))).run(dense(problem));
  EXPECT_EQ(gpu_.launches, 1);
  const Problem no_keys = Problem::parse("attention pass=backward sq=100 sk=0 hq=2 d=64 dtype=bf16");
  gpu_.launches = 0;
  Executor(make_plan(no_keys, Target::cuda_device(0))).run(dense(no_keys));
  EXPECT_EQ(gpu_.launches, 2);
}

TEST_F(Backward, WideHeadsHaveTheirGradientsOfKeysApart) {
  for (const auto& [dims, apart] : {std::pair{"d=128", false}, {"d=192 dv=128", true}, {"d=256", true}}) {
    for (const int sm : {80, 89, 120}) {
      const Target target = Target::emulate(sm, 0);
      const Problem problem = Problem::parse(std::string("attention pass=backward sq=300 hq=2 dtype=bf16 ") + dims);
      const BwdConfig keys = cuda::bwd_config(problem, target, Products::mma_sync, Gradients::keys);
      EXPECT_EQ(keys.apart, apart) << dims;
      for (const Gradients of : {Gradients::queries, Gradients::keys}) {
        const BwdConfig config = cuda::bwd_config(problem, target, Products::mma_sync, of);
        EXPECT_LE(config.smem_bytes(), target.shared_memory) << dims << " on sm" << sm;
        EXPECT_LE(config.accumulators(), 168) << dims << " on sm" << sm;
      }
    }
  }
}

// The derivative of a score is a number more an element: kernels of their own, in sums of a fixed order, by tiles that
// leave it registers.
TEST_F(Backward, AScoreOfOnesOwnLeavesRoomForItsDerivative) {
  const auto problem = [](const std::string& more) {
    return Problem::parse("attention pass=backward sq=4096 hq=2 dtype=bf16 " + more);
  };
  EXPECT_TRUE(cuda::finds_all(problem("d=128"), Target::emulate(90, 0), Products::wgmma));
  EXPECT_TRUE(cuda::finds_all(problem("d=96 score=soft_clip"), Target::emulate(90, 0), Products::wgmma));
  EXPECT_FALSE(cuda::finds_all(problem("d=128 score=soft_clip"), Target::emulate(90, 0), Products::wgmma));
  EXPECT_FALSE(cuda::finds_all(problem("d=64 score=soft_clip"), Target::emulate(80, 0), Products::mma_sync));
  for (const Products products : {Products::mma_sync, Products::wgmma}) {
    const Target target = Target::emulate(products == Products::wgmma ? 90 : 80, 0);
    for (const Gradients of : {Gradients::queries, Gradients::keys}) {
      const BwdConfig config = cuda::bwd_config(problem("d=64 score=soft_clip"), target, products, of);
      EXPECT_TRUE(config.user_score && config.scale_first);
      EXPECT_EQ(config.accumulators(), (of == Gradients::queries ? 32 : 64) + config.stream_rows() * 3 / 2);
      EXPECT_LE(config.accumulators(), products == Products::wgmma ? 160 : 112);
      EXPECT_TRUE(config.differentiates() && !config.keeps_products());
      EXPECT_TRUE(cuda::bwd_config(problem("d=64 softcap=9"), target, products, of).keeps_products());
    }
  }
}

// A derivative of 1 is not kept: everything in one pass, at 128 columns too.
TEST_F(Backward, AScoreThatAddsToProductsWantsNoChainRule) {
  const auto config = [](const std::string& score, const std::string& derivative, const std::string& more = "") {
    register_score(score, {.text = "score + 1.0F", .derivative_text = derivative});
    const Problem problem =
        Problem::parse("attention pass=backward sq=4096 hq=2 d=128 dtype=bf16 score=" + score + more);
    return cuda::bwd_config(problem, Target::emulate(90, 0), Products::wgmma, Gradients::all);
  };
  int count = 0;
  for (const char* one : {"1", "1.0F", "(1.0f)", " return 1.f;\n", "return (0x1.0000000000000p+0F);"}) {
    const BwdConfig additive = config("launch.one" + std::to_string(count++), one);
    EXPECT_TRUE(additive.user_score && additive.additive_score && !additive.keeps_chain()) << one;
    EXPECT_EQ(additive.accumulators(), 128 + additive.stream_rows()) << one;
  }
  for (const char* other : {"11", "1.0F + score", "-1.0F", "1.5F", "score", "return 1.0F * score;", "/* 1 */ 2.0F"}) {
    const BwdConfig scaled = config("launch.other" + std::to_string(count++), other);
    EXPECT_FALSE(scaled.additive_score) << other;
    EXPECT_TRUE(scaled.keeps_chain() && scaled.differentiates()) << other;
  }
  // Under a softcap the product has a derivative of its own.
  EXPECT_TRUE(config("launch.capped", "1", " softcap=9").differentiates());
  const auto all = [](const char* words, int sm, Products products) {
    const Problem problem = Problem::parse(std::string("attention pass=backward sq=4096 hq=2 dtype=bf16 ") + words);
    return cuda::finds_all(problem, Target::emulate(sm, 0), products);
  };
  EXPECT_TRUE(all("d=128 score=relative", 90, Products::wgmma));
  EXPECT_TRUE(all("d=128 score=relative", 80, Products::mma_sync));
  EXPECT_TRUE(all("d=256 score=relative", 80, Products::mma_sync));
}

TEST_F(Backward, WhatItLacksItSays) {
  const auto refusal = [](const std::string& rest, const char* wishes = "") {
    const std::string line = "attention pass=backward sq=128 hq=2 d=64 " + rest;
    const Support support = supports(Problem::parse(line), Target::cuda_device(0), Wishes::parse(wishes));
    EXPECT_FALSE(support) << line;
    return support.reason;
  };
  const auto says = [](const std::string& reason, const char* words) {
    EXPECT_NE(reason.find(std::string("cuda.bwd_mma: ") + words), std::string::npos) << reason;
  };
  says(refusal("dtype=fp32"), "wants q, k and v of one type");
  says(refusal("dtype=bf16:bf16:bf16:fp32"), "wants o and dout in q's type");
  register_score("launch.flat", {"score", {}});
  says(refusal("dtype=bf16 score=launch.flat"), "has no derivative of score callable launch.flat");
  says(refusal("dtype=bf16 score=launch.unknown"), "has no score callable launch.unknown");
  says(refusal("dtype=bf16 dv=264"), "wants head dims of at most 256");
  says(refusal("dtype=bf16", "tile_q=64"), "tile_q cannot be wished for");
  says(refusal("dtype=bf16 kv2=dense sk2=64", "splits=2"), "splits cannot be wished for");
  const std::string fixed = refusal("dtype=bf16 batch_invariant", "splits=2");
  EXPECT_NE(fixed.find("cuda.bwd_wgmma: splits is 2; batch_invariant keeps one part of the rows"), std::string::npos)
      << fixed;
}

TEST_F(Backward, BytesBetweenRowsFit32Bits) {
  const Problem problem = Problem::parse("attention pass=backward sq=2 sk=2 d=64 dtype=bf16");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  constexpr std::int64_t kMost = std::int64_t{1} << 29;
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o, Slot::dout, Slot::dq}) {
    Bindings bindings = dense(problem);
    bindings[slot].data = reinterpret_cast<void*>(std::uintptr_t{1} << 50);  // far from the others
    bindings[slot].strides[1] = kMost;
    expect_error([&] { executor.run(bindings); }, ErrorCode::unsupported, to_string(slot));
  }
}

}  // namespace
}  // namespace tessera
