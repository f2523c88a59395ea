// SPDX-License-Identifier: Apache-2.0
// What a plan's kernels are called and how their sources read.
#include <gtest/gtest.h>

#include <set>

#include "cuda/jit/cache_entry.h"
#include "plan/implementations.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

cuda::KernelSource source_for(const std::string& problem, int sm = 80) {
  const Plan plan = make_plan(Problem::parse(problem), Target::cuda(sm));
  EXPECT_FALSE(plan.state().kernels.empty()) << problem;
  return plan.state().kernels.front();
}

bool has_text(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(KernelSource, NamesOneConfigurationInTenLines) {
  const cuda::KernelSource source =
      source_for("attention sq=100 hq=4 hkv=2 d=64 dtype=fp16 softcap=30 kv=table page=16");
  EXPECT_TRUE(has_text(source.text, "#include \"cuda/attention/forward/mma.cuh\"")) << source.text;
  EXPECT_TRUE(has_text(source.text, "__global__")) << source.text;
  EXPECT_TRUE(has_text(source.text, cuda::kKernelEntry)) << source.text;
  EXPECT_TRUE(has_text(source.text, "Element::fp16")) << source.text;
  EXPECT_TRUE(has_text(source.text, ".d = 64")) << source.text;
  EXPECT_TRUE(has_text(source.text, ".softcap = Softcap::exponential")) << source.text;
  EXPECT_TRUE(has_text(source.text, "Source::paged")) << source.text;
  EXPECT_LE(std::count(source.text.begin(), source.text.end(), '\n'), 12);
  for (const char* part : {"fp16", "d=64:64", "paged", "softcap"}) EXPECT_TRUE(has_text(source.name, part)) << part;
}

TEST(KernelSource, LengthsHeadsAndMasksOfPositionsAreNotInIt) {
  for (const int sm : {80, 90}) {
    const std::string one = source_for("attention sq=4096 hq=16 d=128 dtype=bf16 causal", sm).text;
    for (const char* other :
         {"attention sq=4000 hq=16 d=128 dtype=bf16", "attention b=7 sq=4096 hq=16 hkv=4 d=128 dtype=bf16",
          "attention sq=4096 hq=16 d=120 dtype=bf16 window=100:50 sink lse",
          "attention b=3 sq=4096 hq=16 d=128 dtype=bf16 seqused_q kv=varlen"}) {
      EXPECT_EQ(source_for(other, sm).text, one) << other;
    }
    const std::string varlen = source_for("attention b=3 sq=4096 hq=16 d=128 dtype=bf16 layout=varlen", sm).text;
    EXPECT_EQ(varlen == one, sm == 80) << "by wgmma packed sequences have row tiles of their own";
    for (const char* other : {"attention b=99 sq=4000 hq=16 hkv=4 d=128 dtype=bf16 layout=varlen tq=50000 causal",
                              "attention b=3 sq=4096 hq=16 d=128 dtype=bf16 layout=varlen seqused_q lse"}) {
      EXPECT_EQ(source_for(other, sm).text, varlen) << other;
    }
  }
}

TEST(KernelSource, WhatChangesInstructionsIs) {
  std::set<std::string> texts, names;
  const char* problems[] = {"attention sq=4096 d=128 dtype=bf16",
                            "attention sq=4096 d=128 dtype=fp16",
                            "attention sq=4096 d=64 dtype=bf16",
                            "attention sq=4096 d=128 dv=64 dtype=bf16",
                            "attention sq=4096 d=128 dtype=bf16:bf16:bf16:fp32",
                            "attention sq=4096 d=128 dtype=bf16 kv=table page=16",
                            "attention sq=4096 d=128 dv=512 dtype=bf16",
                            "attention sq=4096 d=128 dv=256 dtype=bf16",
                            "attention sq=4096 d=128 dtype=bf16 kv2=dense sk2=100",
                            "attention sq=4096 d=128 dtype=bf16 kv=table page=16 kv2=table sk2=100 page2=16",
                            "attention sq=4096 d=128 dtype=bf16 kv=table page=16 kv2=dense sk2=100",
                            "attention sq=4096 d=128 dtype=bf16 softcap=3",
                            "attention sq=4096 d=128 dtype=bf16 softcap=65",
                            "attention sq=4096 d=128 dtype=bf16 alibi",
                            "attention sq=4096 d=128 dtype=bf16 scale=-1"};
  for (const int sm : {80, 90}) {
    for (const char* problem : problems) {
      const cuda::KernelSource source = source_for(problem, sm);
      // What wgmma does not take is the same kernel on both.
      const bool known = sm == 90 && source.text.find("forward/mma.cuh") != std::string::npos;
      EXPECT_TRUE(texts.insert(source.text).second || known) << problem << "\n" << source.text;
      EXPECT_TRUE(names.insert(source.name).second || known) << problem << "\n" << source.name;
    }
  }
}

TEST(KernelSource, CapsOutsideOfAMiddleRangeAndThoseBesideAScoreCallableAreRational) {
  for (const int sm : {80, 90}) {
    const auto has = [sm](const std::string& form, const std::string& problem) {
      return has_text(source_for("attention sq=4096 d=128 dtype=bf16 " + problem, sm).text, "Softcap::" + form);
    };
    for (const char* cap : {"softcap=0.0009765625", "softcap=1", "softcap=64"}) {
      EXPECT_TRUE(has("exponential", cap)) << cap;
      EXPECT_TRUE(has("rational", cap + std::string(" score=relative"))) << cap;
    }
    for (const char* cap : {"softcap=0.0009", "softcap=64.5"}) EXPECT_TRUE(has("rational", cap)) << cap;
    EXPECT_FALSE(has("", "scale=2"));
  }
}

TEST(KernelSource, OutputsOfFp32AreDividedByRoundedSumsButPartialsAreNot) {
  for (const int sm : {80, 90, 120}) {
    Target target = Target::cuda(sm);
    target.multiprocessors = 100;
    const auto text_of = [&](const std::string& problem) {
      return make_plan(Problem::parse("attention d=128 " + problem), target).state().kernels.front().text;
    };
    const auto rounds = [&](const std::string& problem) { return has_text(text_of(problem), ".rounded_sums = true"); };
    const auto has_partials = [&](const std::string& problem) {
      return has_text(text_of(problem), ".output = Element::fp32");
    };
    for (const char* problem : {"sq=4096 dtype=bf16:bf16:bf16:fp32", "sq=4096 dtype=fp16:fp16:fp16:fp32 dropout=0.1",
                                "sq=1 sk=4096 dtype=bf16:bf16:bf16:fp32"}) {
      EXPECT_TRUE(rounds(problem)) << problem;
    }
    EXPECT_FALSE(rounds("sq=4096 dtype=bf16"));
    EXPECT_TRUE(has_partials("sq=1 sk=4096 dtype=bf16"));
    EXPECT_FALSE(rounds("sq=1 sk=4096 dtype=bf16"));
  }
}

TEST(KernelSource, EitherSegmentOfTwoMayBeThePagedOne) {
  EXPECT_EQ(source_for("attention sq=4096 d=128 dtype=bf16 kv=table page=16 kv2=dense sk2=100").text,
            source_for("attention sq=4096 d=128 dtype=bf16 kv=varlen kv2=csr sk2=100 page2=16").text);
}

// The table of gpu_mma_loader under SM120's plans says where which loader is fastest.
TEST(KernelSource, OnSm120TheLoaderFollowsRowTilesAndColumns) {
  const auto loader_of = [](const std::string& problem, int sm = 120) {
    Target target = Target::cuda(sm);
    target.multiprocessors = 100;
    const std::string text =
        make_plan(Problem::parse("attention dtype=bf16 " + problem), target).state().kernels.front().text;
    return has_text(text, "Loader::tma_warp") ? "tma_warp" : has_text(text, "Loader::tma") ? "tma" : "cp_async";
  };
  EXPECT_STREQ(loader_of("sq=2560 hq=10 d=64"), "tma_warp");  // 20 row tiles of 128 for each of 10 heads
  EXPECT_STREQ(loader_of("sq=2561 hq=10 d=64"), "tma");
  EXPECT_STREQ(loader_of("sq=2560 hq=10 d=128"), "tma_warp");
  EXPECT_STREQ(loader_of("sq=2561 hq=10 d=128"), "cp_async");
  for (const char* other : {"sq=64 hq=10 d=64", "sq=512 hq=10 d=96", "sq=512 hq=10 d=128 dv=64", "sq=512 d=64 alibi",
                            "sq=512 d=64 kv=table page=16", "sq=512 d=64 list=indices block=64x64"}) {
    EXPECT_STREQ(loader_of(other), "cp_async") << other;
  }
  EXPECT_STREQ(loader_of("sq=2560 hq=10 d=64", 100), "cp_async");
}

TEST(KernelSource, EveryPairOfHeadDimsFitsEveryChip) {
  for (const char* rest : {"", " list=indices block=64x64", " list=bitmask block=24x8 mask=document", " dropout=0.1"}) {
    for (std::int64_t d = 8; d <= 512; d += 8) {
      for (std::int64_t dv = 8; dv <= 512; dv += 8) {
        Problem problem = Problem::parse(std::string("attention sq=4096 dtype=bf16") + rest);
        problem.head_dim_qk = d;
        problem.head_dim_v = dv;
        for (const int sm : {80, 89, 90, 100, 120}) {
          const std::string name = make_plan(problem, Target::cuda(sm)).implementation();
          ASSERT_TRUE(name == "cuda.fwd_mma" || (sm == 90 && name == "cuda.fwd_wgmma")) << problem.to_string();
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
