// SPDX-License-Identifier: Apache-2.0
// What plans by wgmma choose.
#include <gtest/gtest.h>

#include <utility>

#include "cases/line/case.h"
#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/features.h"
#include "cuda/attention/forward/kernel_source.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/driver/occupancy.h"
#include "plan/implementations.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

// Taken unasked where it is faster, on request where it is possible.
TEST(Wgmma, IsTakenWhereItIsFaster) {
  const auto implementation = [](const std::string& line, int sm, const char* wishes = "") {
    return make_plan(Problem::parse("attention dtype=bf16 " + line), Target::cuda(sm), Wishes::parse(wishes))
        .implementation();
  };
  const char* wish = "implementation=cuda.fwd_wgmma";
  for (const char* line :
       {"sq=100 d=64", "sq=100 d=128 kv=table page=16", "sq=100 d=256 kv2=dense sk2=30", "sq=100 d=128 dropout=0.1",
        "sq=100 d=64 dropout=0.1", "sq=100 d=64 list=indices block=64x64", "sq=20 hq=8 hkv=2 d=128",
        "sq=100 d=96 kv=csr page=16 kv2=dense sk2=9"}) {
    EXPECT_EQ(implementation(line, 90), "cuda.fwd_wgmma") << line;
    for (const int sm : {80, 89, 100, 120}) EXPECT_EQ(implementation(line, sm), "cuda.fwd_mma") << line;
  }
  for (const char* line :
       {"sq=64 d=128", "sq=100 d=32 dropout=0.1", "sq=100 d=64 kv=table page=8", "sq=100 d=128 kv=csr page=100"}) {
    EXPECT_EQ(implementation(line, 90), "cuda.fwd_mma") << line;
    EXPECT_EQ(implementation(line, 90, wish), "cuda.fwd_wgmma") << line;
  }
  for (const char* line : {"sq=100 d=512", "sq=100 d=64 mass=mean", "sq=100 d=96 kv=table page=15"}) {
    EXPECT_EQ(implementation(line, 90), "cuda.fwd_mma") << line;
    EXPECT_THROW(implementation(line, 90, wish), Error) << line;
  }
  EXPECT_THROW(implementation("sq=100 d=64", 80, wish), Error);
  EXPECT_THROW(implementation("sq=100 d=64", 100, wish), Error);
}

// ALiBi is linear where no query sees a key after it. Tiles are those of a plan without a score, unless
// registers or memory are short.
TEST(Wgmma, TakesLinearScoresByParts) {
  const auto plan = [](const std::string& words) {
    return make_plan(Problem::parse("attention dtype=bf16 sq=2000 hq=8 " + words), Target::cuda(90), {});
  };
  const auto kernel = [&](const std::string& words) { return plan(words).state().kernels.front().name; };
  for (const char* words :
       {"d=64 causal alibi", "d=128 window=100:-1 alibi", "d=192 causal alibi list=indices block=64x64",
        "d=256 causal alibi dropout=0.1", "d=128 causal alibi mask=document"}) {
    EXPECT_NE(kernel(words).find(" linear_score"), std::string::npos) << kernel(words);
    EXPECT_EQ(kernel(words).find(" scale_first"), std::string::npos) << kernel(words);
  }
  for (const char* words :
       {"d=64 alibi", "d=64 window=*:1 alibi", "d=64 causal alibi softcap=3", "d=64 causal alibi scale=-1",
        "d=64 causal alibi score=relative", "d=64 causal alibi kv2=dense sk2=30"}) {
    EXPECT_EQ(kernel(words).find(" linear_score"), std::string::npos) << kernel(words);
    EXPECT_NE(kernel(words).find(" scale_first"), std::string::npos) << kernel(words);
  }
  for (const char* words : {"d=32 causal", "d=96 causal", "d=128 causal", "d=192 causal"}) {
    const std::string none = kernel(words);
    const std::string tiles = none.substr(0, none.find(" stages"));
    EXPECT_EQ(kernel(std::string(words) + " alibi").find(tiles), 0U) << tiles;
  }
  EXPECT_EQ(plan("d=256 causal alibi").implementation(), "cuda.fwd_wgmma");
}

// Products of 8 bits where q, k and v are of e4m3; few rows go to the kernel of decode steps, and so does what is left.
TEST(Wgmma, MultipliesEightBits) {
  const auto plan = [](const std::string& line, int sm) {
    return make_plan(Problem::parse("attention " + line), Target::cuda(sm), {});
  };
  const std::string e4m3 = "dtype=e4m3:e4m3:e4m3:";
  for (const char* line : {"bf16 sq=100 d=64", "fp16 sq=100 d=128 kv=table page=8", "fp32 sq=100 d=256 causal",
                           "bf16 sq=40 d=64 dropout=0.1", "bf16 sq=20 hq=8 hkv=2 d=128 list=indices"}) {
    const Plan bytes = plan(e4m3 + line, 90);
    EXPECT_EQ(bytes.implementation(), "cuda.fwd_wgmma") << line;
    EXPECT_EQ(bytes.state().tile_kv % 32, 0) << line;
    EXPECT_EQ(bytes.state().kernels.front().name.find("fwd_wgmma e4m3"), 0U) << bytes.state().kernels.front().name;
    if (std::string(line).find("list") == std::string::npos) {
      EXPECT_EQ(plan(e4m3 + line, 80).implementation(), "cuda.fwd_decode") << line;
    }
  }
  for (const std::string& line :
       {e4m3 + "bf16 sq=1 d=128", e4m3 + "bf16 sq=32 d=64", std::string("dtype=bf16:e4m3:e4m3:bf16 sq=100 d=64"),
        std::string("dtype=e4m3:e4m3:e5m2:bf16 sq=100 d=64"), e4m3 + "bf16 sq=100 sk=32769 d=192"}) {
    EXPECT_EQ(plan(line, 90).implementation(), "cuda.fwd_decode") << line;
  }
  for (const char* line : {"bf16 sq=100 d=64 descale=token", "bf16 sq=100 d=64 smooth", "bf16 sq=100 d=40",
                           "bf16 sq=100 d=64 mass=mean list=indices", "bf16 sq=128 d=64 list=bitmask skip=mass"}) {
    EXPECT_THROW(plan(e4m3 + line, 90), Error) << line;
  }
}

// Scores of int8 go where those of 16 bits do; kernels know how their descales lie.
TEST(Wgmma, MultipliesScoresOfInt8) {
  const auto plan = [](const std::string& line, int sm) {
    return make_plan(Problem::parse("attention dtype=int8:int8:bf16:bf16 sq=200 d=128 " + line), Target::cuda(sm), {});
  };
  const std::pair<const char*, const char*> words[] = {{"", " int8_scores"},
                                                       {"smooth", " int8_scores smooth"},
                                                       {"descale=token", " int8_scores descales_keys"},
                                                       {"descale=block:8 smooth", " int8_scores descales_keys smooth"}};
  for (const auto& [line, end] : words) {
    const Plan wgmma = plan(line, 90);
    EXPECT_EQ(wgmma.implementation(), "cuda.fwd_wgmma") << line;
    for (const int sm : {80, 89, 100, 120}) EXPECT_EQ(plan(line, sm).implementation(), "cuda.fwd_mma") << line;
    for (const Plan& made : {wgmma, plan(line, 80)}) {
      const std::string& name = made.state().kernels.front().name;
      EXPECT_TRUE(name.ends_with(end)) << name;
    }
  }
  EXPECT_EQ(plan("mass=mean", 90).implementation(), "cuda.fwd_mma");
}

// Columns of a tile share a descale of K as far as its blocks, the tile and a list's pieces of it allow.
TEST(Wgmma, ColumnsOfABlockShareADescale) {
  const auto word = [](const std::string& line, int sm) -> std::string {
    const cases::Case of = cases::Case::parse("attention dtype=int8:int8:bf16:bf16 sq=2000 " + line);
    const std::string name = make_plan(of.problem, Target::cuda(sm), of.wishes).state().kernels.front().name;
    const std::size_t at = name.find("keys_a_descale=");
    return at == std::string::npos ? "" : name.substr(at + 15, 2);
  };
  const std::pair<const char*, const char*> shared[] = {{"d=128 descale=block:64", "64"},
                                                        {"d=128 descale=block:128 smooth", "64"},
                                                        {"d=128 descale=block:96", "32"},
                                                        {"d=192 descale=block:64", "32"},  // tiles of 96 keys
                                                        {"d=256 descale=block:64", "16"},  // of 80
                                                        {"d=128 descale=block:48", "16"},
                                                        {"d=128 descale=block:64 layout=varlen tq=5000", "64"},
                                                        {"d=128 descale=block:32 kv=table page=96", "32"},
                                                        {"d=128 descale=block:64 list=indices block=128x128", "64"},
                                                        {"d=128 descale=block:64 list=indices block=128x32", "32"},
                                                        {"d=128 descale=block:40", ""},
                                                        {"d=128 descale=token", ""},
                                                        {"d=128", ""}};
  for (const auto& [line, keys] : shared) {
    EXPECT_EQ(word(line, 90), keys) << line;
    EXPECT_EQ(word(line, 80), "") << line;
  }
}

// Three groups of 64 rows for narrow heads, but where a fifth of their rows or some multiprocessors had nothing to do.
TEST(Wgmma, RowsFillTheTilesOfNarrowHeads) {
  const auto tile_q = [](const std::string& line) {
    Target target = Target::cuda(90);
    target.multiprocessors = 132;
    return make_plan(Problem::parse("attention d=64 " + line), target).state().tile_q;
  };
  for (const std::string type :
       {"dtype=bf16 ", "dtype=int8:int8:bf16:bf16 ", "dtype=int8:int8:bf16:bf16 descale=block:64 smooth "}) {
    for (const char* line : {"b=16 sq=512 hq=32", "b=4 sq=8192 hq=32 causal", "b=16 sq=2000 hq=32 causal",
                             "b=16 sq=600 hq=32 layout=varlen tq=8000", "b=50 sq=180 hq=8"}) {
      EXPECT_EQ(tile_q(type + line), 192) << type << line;
    }
    for (const char* line : {"b=16 sq=512 hq=32 causal", "b=16 sq=256 hq=32", "b=1 sq=512 hq=32", "sq=4096 hq=4",
                             "b=100 sq=2000 hq=32 layout=varlen tq=6000", "b=100 sq=60 hq=32"}) {
      EXPECT_EQ(tile_q(type + line), 64) << type << line;
    }
  }
  EXPECT_EQ(tile_q("dtype=int8:int8:bf16:fp32 b=4 sq=8192 hq=32"), 192);
  EXPECT_EQ(tile_q("dtype=int8:int8:bf16:bf16 b=4 sq=8192 hq=32 residual"), 192);
  // Boxes that pages cut leave int8 two groups. So do registers, for linear scores beside rounded sums.
  for (const char* line : {"dtype=int8:int8:bf16:bf16 b=4 sq=8192 hq=32 kv=table page=64",
                           "dtype=bf16 b=4 sq=8192 hq=32 causal alibi residual"}) {
    EXPECT_EQ(tile_q(line), 128) << line;
  }
}

// The tensor cores sum the rounded P where a panel of ones fits behind each tile of V: 128 bytes, or 64, for each key
// of the ring. The tiles stay those of an O that needs no such sums.
TEST(Wgmma, RoundedSumsTakeAPanelOfOnes) {
  const auto plan = [](const std::string& line) {
    Target target = Target::cuda(90);
    target.multiprocessors = 132;
    return make_plan(Problem::parse("attention b=4 hq=32 " + line), target);
  };
  const auto bytes = [](const Plan& of) { return of.state().kernels.front().shared_bytes; };
  struct Row {
    const char* line;
    std::size_t ones;
  };
  for (const Row& row : {Row{"sq=8192 d=64 dtype=bf16", 4 * 128 * 128}, Row{"sq=8192 d=64 dtype=fp16", 4 * 128 * 128},
                         Row{"sq=8192 d=128 dtype=bf16 causal", 2 * 128 * 128},
                         Row{"sq=8192 d=96 dtype=bf16", 2 * 128 * 64}, Row{"sq=8192 d=192 dtype=bf16", 2 * 96 * 128},
                         Row{"sq=8192 d=256 dtype=bf16", 0}, Row{"sq=8192 d=128 dtype=bf16 kv=table page=16", 0}}) {
    const Plan without = plan(row.line);
    const Plan with = plan(std::string(row.line) + " residual");
    EXPECT_EQ(with.state().tile_q, without.state().tile_q) << row.line;
    EXPECT_EQ(with.state().tile_kv, without.state().tile_kv) << row.line;
    EXPECT_EQ(bytes(with) - bytes(without), row.ones) << row.line;
  }
}

// Ones cost a multiprocessor no block: a ring of two stages makes room for them, or P is unpacked and added.
TEST(Wgmma, OnesTakeNoBlockFromAMultiprocessor) {
  const auto plan = [](const std::string& line) {
    const cases::Case of = cases::Case::parse("attention dtype=bf16 " + line);
    Target target = Target::cuda(90);
    target.multiprocessors = 132;
    return make_plan(of.problem, target, of.wishes);
  };
  const auto blocks = [](const Plan& of) {
    return cuda::blocks_that_fit(static_cast<int>(of.state().kernels.front().shared_bytes), Target::cuda(90));
  };
  const auto has = [](const Plan& of, const char* word) {
    return of.state().kernels.front().name.find(word) != std::string::npos;
  };
  const Plan causal = plan("b=4 sq=512 hq=32 d=64 causal residual");
  EXPECT_EQ(blocks(causal), 3);
  EXPECT_TRUE(has(causal, " stages=2 ") && has(causal, " sums_by_product")) << causal.state().kernels.front().name;
  const Plan wished = plan("b=4 sq=512 hq=32 d=64 causal residual stages=4");
  EXPECT_EQ(blocks(wished), 3);
  EXPECT_TRUE(has(wished, " stages=4 ") && !has(wished, " sums_by_product")) << wished.state().kernels.front().name;
  const Plan narrow = plan("b=4 sq=512 hq=32 d=32 causal residual");
  EXPECT_TRUE(has(narrow, " stages=4 ") && has(narrow, " sums_by_product")) << narrow.state().kernels.front().name;
  const Plan invariant = plan("b=64 sq=100 hq=8 d=96 batch_invariant residual");
  EXPECT_EQ(blocks(invariant), 2);
  EXPECT_FALSE(has(invariant, " sums_by_product")) << invariant.state().kernels.front().name;
  const Plan deep = plan("b=4 sq=8192 hq=32 d=128 residual stages=3");  // where ones do not fit
  EXPECT_EQ(deep.implementation(), "cuda.fwd_wgmma");
  EXPECT_FALSE(has(deep, " sums_by_product")) << deep.state().kernels.front().name;
}

// Groups of 64 rows begin their products in turn, but of 128 columns and with many keys or row tiles. Two groups that
// multiply e4m3 exponentiate in turn.
TEST(Wgmma, GroupsBeginAtWillWhereThatIsFaster) {
  const auto name = [](const std::string& line) {
    Target target = Target::cuda(90);
    target.multiprocessors = 132;
    const cases::Case of = cases::Case::parse("attention " + line);
    return make_plan(of.problem, target, of.wishes).state().kernels.front().name;
  };
  for (const char* line :
       {"sq=4096 hq=16 d=128 dtype=bf16", "b=4 sq=8192 hq=32 hkv=8 d=128 dtype=fp16 causal",
        "b=8 sq=1024 hq=16 d=128 dtype=bf16 causal", "sq=8192 hq=16 d=128 dtype=bf16 softcap=20",
        "sq=8192 hq=16 d=128 dtype=bf16 window=999:0", "sq=8192 hq=16 d=64 dtype=e4m3:e4m3:e4m3:bf16",
        // tests/cases/dense.txt
        "sq=130 sk=4100 d=128 dtype=fp16 tile_q=128 splits=1 lse seed=86",
        "b=2 sq=200 sk=4200 hq=4 hkv=2 d=128 dtype=bf16 causal tile_q=128 tile_kv=64 splits=1 lse seed=87",
        "b=3 sq=300 sk=4300 hq=2 d=104 dtype=bf16 layout=varlen tq=700 causal sink tile_q=128 splits=1 lse seed=88",
        "sq=129 sk=4100 hq=6 hkv=2 d=128 dv=64 dtype=bf16 tile_q=128 splits=1 seed=89",
        "sq=140 sk=4100 hq=2 d=128 dtype=bf16 window=900:5 softcap=9 tile_q=128 splits=1 lse seed=90"}) {
    EXPECT_NE(name(line).find(" ping_pong=no"), std::string::npos) << line << ": " << name(line);
  }
  for (const char* line :
       {"b=16 sq=512 hq=16 d=128 dtype=bf16", "sq=1024 hq=16 hkv=8 d=128 dtype=bf16 causal",
        "sq=8192 hq=16 d=64 dtype=bf16", "sq=8192 hq=16 d=256 dtype=bf16",
        "sq=8192 hq=16 d=128 dtype=bf16 list=indices block=128x128", "sq=8192 hq=16 d=128 dtype=bf16 kv=table page=64",
        "sq=8192 hq=16 d=128 dtype=bf16 tile_q=64", "sq=8192 hq=16 d=128 dtype=e4m3:e4m3:e4m3:bf16"}) {
    EXPECT_EQ(name(line).find(" ping_pong=no"), std::string::npos) << line;
  }
}

// A sequence's row tiles are counted apart from the others': a section lies within one.
TEST(Wgmma, PackedSequencesHaveTheRowTilesOfTheirOwnLength) {
  Target target = Target::cuda(90);
  target.multiprocessors = 132;
  const auto head_batches = [&](const std::string& line, std::int64_t splits, cuda::Products products) {
    const Problem problem = Problem::parse("attention dtype=bf16 d=64 hq=6 causal " + line);
    const cuda::FwdConfig config = cuda::fwd_config(problem, target, splits, {}, products);
    const bool varlen = problem.q_layout == Layout::varlen && products == cuda::Products::wgmma;
    EXPECT_EQ(config.varlen, varlen) << line;
    const std::string name = cuda::fwd_source(config, {}).name;
    EXPECT_EQ(name.find(" varlen") != std::string::npos, varlen) << name;
    return cuda::tile_schedule(config, problem, splits, cuda::packed_heads(problem)).head_batches.value;
  };
  const auto wgmma = cuda::Products::wgmma;
  EXPECT_EQ(head_batches("b=5 sq=1000", 1, wgmma), 30U);
  EXPECT_EQ(head_batches("b=5 sq=1000 layout=varlen tq=3000", 1, wgmma), 6U);
  EXPECT_EQ(head_batches("b=5 sq=1000 layout=varlen tq=3000", 2, wgmma), 12U) << "heads and splits";
  EXPECT_EQ(head_batches("b=5 sq=16384 layout=varlen tq=30000", 1, wgmma), 3U) << "of 4 MB each in 16 MB";
  EXPECT_EQ(head_batches("b=5 sq=1000 layout=varlen tq=3000", 1, cuda::Products::mma_sync), 30U);
}

}  // namespace
}  // namespace tessera
