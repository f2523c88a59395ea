// SPDX-License-Identifier: Apache-2.0
// What plans of few rows, whose warps take keys each, choose.
#include <gtest/gtest.h>

#include "cuda/attention/forward/config.h"
#include "cuda/attention/forward/schedule.h"
#include "cuda/attention/splits/partials.h"
#include "plan/implementations.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

Target chip(int sm, int multiprocessors) {
  Target target = Target::cuda(sm);
  target.multiprocessors = multiprocessors;
  return target;
}

Plan decode_plan(const std::string& line, const Target& target, const std::string& wishes = "") {
  return make_plan(Problem::parse("attention dtype=bf16 " + line), target,
                   Wishes::parse("implementation=cuda.fwd_decode " + wishes));
}

// Taken unasked where a row tile has all rows.
TEST(Decode, IsTakenForFewRows) {
  const auto implementation = [](const std::string& line, int sm) {
    return make_plan(Problem::parse("attention dtype=bf16 " + line), chip(sm, 132)).implementation();
  };
  for (const int sm : {80, 89, 90, 100, 120}) {
    for (const char* line : {"sq=1 d=128", "sq=32 d=64", "sq=8 hq=32 hkv=8 d=128 kv=table page=16", "sq=16 d=256",
                             "sq=1 hq=8 hkv=1 d=64 dropout=0.1", "sq=4 d=96 kv=csr page=1 kv2=dense sk2=9"}) {
      EXPECT_EQ(implementation(line, sm), "cuda.fwd_decode") << line;
    }
    for (const char* line : {"sq=33 d=64", "sq=9 hq=32 hkv=8 d=128", "sq=17 d=256", "sq=1 d=512", "sq=1 d=64 mass=mean",
                             "sq=1 sk=128 d=64 block=1x64 list=indices"}) {
      EXPECT_NE(implementation(line, sm), "cuda.fwd_decode") << line;
    }
  }
}

// Splits fill the places of whole waves; sequences of their own lengths get several waves.
TEST(Decode, SplitsFillTheLastWave) {
  const auto splits = [](const std::string& line, const std::string& wishes = "") {
    return decode_plan("sq=1 d=128 hq=32 hkv=8 " + line, chip(90, 132), wishes).state().splits;
  };
  EXPECT_EQ(splits("b=64 sk=4096"), 1);  // 512 blocks of 2 · 264 places
  EXPECT_EQ(splits("b=8 sk=16384"), 2);  // 128 blocks of four warps for 132 multiprocessors
  EXPECT_EQ(splits("b=1 sk=4096"), 16);
  EXPECT_EQ(splits("b=16 sk=8192"), 1);
  EXPECT_EQ(splits("b=12 sk=8192"), 8);  // 96 blocks would leave a quarter without work: three waves of 264 places
  EXPECT_EQ(splits("b=1 sk=64"), 1);
  EXPECT_EQ(splits("b=1 sk=4096", "splits=7"), 7);
  EXPECT_EQ(splits("b=8 sk=16384 batch_invariant"), 1);
  for (const char* line : {"b=64 sk=4096 seqused_k", "b=64 sk=4096 kv=table page=16", "b=64 sk=4096 kv=varlen"}) {
    EXPECT_EQ(splits(line), 1) << line;  // 2 MB of the longest for each block
  }
  EXPECT_EQ(splits("b=1 sk=131072 chunk=255"), splits("b=1 sk=256"));
  const Plan many = decode_plan("sq=1 d=128 hq=64 hkv=8 b=4096 sk=32768 kv=table page=64", chip(90, 132));
  EXPECT_LE(many.state().splits * 4096, 65535);
  for (const char* line : {"b=1023 sk=131072", "b=255 sk=1048576", "b=1024 sk=131072"}) {  // parts of 256 MB at most
    const Plan large = decode_plan(std::string("sq=1 d=128 hq=64 hkv=8 kv=table page=16 ") + line, chip(90, 132));
    EXPECT_GT(large.state().splits, 1) << line;
    EXPECT_LE(large.workspace_bytes(), std::size_t{257} << 20) << line;
  }
  EXPECT_EQ(splits("b=64 sk=30000 kv=table page=16"), 8);
  EXPECT_EQ(splits("b=1 sk=131072 window=255:0"), splits("b=1 sk=256"));  // what a window hides is nobody's
  // Of 8 bits a wave's blocks have eight warps where each has 8 tiles and more.
  const auto bytes = [](const std::string& line) {
    const Problem problem = Problem::parse("attention dtype=bf16:e4m3:e4m3:bf16 sq=1 d=128 hq=32 hkv=8 " + line);
    const Plan plan = make_plan(problem, chip(90, 132), Wishes::parse("implementation=cuda.fwd_decode"));
    const bool has_eight = plan.state().kernels.front().name.find(" warps=8") != std::string::npos;
    return std::pair{plan.state().splits, has_eight ? 8 : 4};
  };
  EXPECT_EQ(bytes("b=16 sk=4096"), std::pair(std::int64_t{1}, 8));
  EXPECT_EQ(bytes("b=1 sk=65536"), std::pair(std::int64_t{16}, 8));
  EXPECT_EQ(bytes("b=4 sk=4096"), std::pair(std::int64_t{8}, 4));
  EXPECT_EQ(bytes("b=64 sk=8192"), std::pair(std::int64_t{1}, 4));
  EXPECT_EQ(bytes("b=16 sk=4096 kv=table page=16"), std::pair(std::int64_t{2}, 4));  // 512 KB for each block
  for (const std::int64_t sk : {500, 4096, 16384, 100000}) {
    for (const int batch : {1, 3, 17, 40, 200}) {
      const std::string line = "b=" + std::to_string(batch) + " sk=" + std::to_string(sk);
      const std::int64_t parts = splits(line);
      const std::int64_t blocks = std::int64_t{batch} * 8 * parts;
      const std::int64_t waves = (blocks + 263) / 264;
      const bool long_enough = sk / parts >= 1000;
      const bool one_wave = blocks <= 132 && blocks * 10 >= 132 * 9;
      EXPECT_TRUE(!long_enough || one_wave || blocks * 10 >= waves * 264 * 8) << line << ": " << parts;
    }
  }
}

TEST(Decode, LoaderAndTilesFollowWhereKeysLie) {
  const auto name = [](const std::string& line, int sm) {
    return decode_plan(line, chip(sm, 100)).state().kernels.front().name;
  };
  const auto has = [](const std::string& text, const char* word) { return text.find(word) != std::string::npos; };
  for (const char* line :
       {"sq=1 d=128", "sq=1 d=128 kv=varlen", "sq=1 d=64 kv=table page=64", "sq=1 d=128 kv=csr page=32"}) {
    EXPECT_TRUE(has(name(line, 90), "x32 ") && has(name(line, 90), "loader=tma")) << name(line, 90);
    EXPECT_FALSE(has(name(line, 80), "loader=tma") || has(name(line, 120), "loader=tma")) << line;
  }
  for (const char* line : {"sq=1 d=128 kv=table page=16", "sq=1 d=128 kv2=dense sk2=9", "sq=1 d=64 kv=csr page=1",
                           "sq=1 d=128 dropout=0.1", "sq=1 d=64 kv=table page=48"}) {
    EXPECT_FALSE(has(name(line, 90), "loader=tma")) << line;
  }
  EXPECT_TRUE(has(name("sq=4 hq=8 hkv=2 d=128", 90), "tile=16x"));
  EXPECT_TRUE(has(name("sq=5 hq=8 hkv=2 d=128", 90), "tile=32x"));
  EXPECT_TRUE(has(name("sq=5 hq=8 hkv=2 d=256", 90), "tile=16x"));
}

// One launch; the workspace holds a counter for each row tile behind the parts.
TEST(Decode, MergesItsSplitsItself) {
  const Plan plan = decode_plan("b=3 sq=1 sk=4096 hq=32 hkv=8 d=128 lse", chip(90, 132), "splits=5");
  ASSERT_EQ(plan.state().kernels.size(), 1U);
  EXPECT_NE(plan.explain().find("5 parts of the keys, merged by the last block"), std::string::npos) << plan.explain();
  const std::size_t parts = cuda::partials_bytes(plan.problem(), 5);
  EXPECT_EQ(plan.workspace_bytes(), parts + 3 * 8 * 8);
  EXPECT_EQ(decode_plan("b=3 sq=1 sk=4096 d=128", chip(90, 132), "splits=1").workspace_bytes(), 0U);
}

TEST(Decode, SaysWhatItDoesNotDo) {
  const auto refusal = [](const std::string& line, const std::string& wishes = "", int sm = 90) {
    try {
      decode_plan(line, chip(sm, 132), wishes);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  const auto expect = [&](const std::string& got, const char* want) {
    EXPECT_NE(got.find(want), std::string::npos) << got;
  };
  expect(refusal("sq=1 sk=128 d=64 block=1x64 list=indices"), "walks no lists");
  expect(refusal("sq=1 d=512"), "wants at most 256 columns");
  expect(refusal("sq=1 d=64 mass=mean"), "gathers no masses");
  expect(refusal("sq=1 d=64", "tile_q=64"), "tile_q is 64; want 16 or 32");
  expect(refusal("sq=1 d=64", "tile_kv=64"), "tile_kv is 64; want 16 or 32");
  expect(refusal("sq=1 d=64", "warps=3"), "warps is 3; want 1, 2, 4 or 8");
  expect(refusal("sq=1 d=64", "stages=1"), "stages is 1; want 2 to 8");
  expect(refusal("sq=1 d=256", "tile_q=32 stages=4"), "registers a thread");
  expect(refusal("sq=1 d=64", "loader=tma_warp"), "loader is tma_warp; want cp_async or tma");
  expect(refusal("sq=1 d=64", "loader=tma", 80), "loader is tma; that wants SM90");
  expect(refusal("sq=1 d=64 kv2=dense sk2=9", "loader=tma"), "one source of keys");
}

}  // namespace
}  // namespace tessera
