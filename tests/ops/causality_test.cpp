// SPDX-License-Identifier: Apache-2.0
// What a row must not depend on: perturbed or NaN keys that it does not see change none of its bits.
#include <gtest/gtest.h>

#include <limits>

#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Sets k and v of keys [first, end) of all heads.
void set_non_finite_keys(SequenceRun& run, std::int64_t first, std::int64_t end, double k, double v) {
  const auto d = static_cast<std::size_t>(run.problem().head_dim_qk);
  const auto dv = static_cast<std::size_t>(run.problem().head_dim_v);
  for (std::int64_t j = first; j < end; ++j) {
    for (std::int64_t h = 0; h < run.problem().heads_kv; ++h) {
      run.set_key_row(Slot::k, 0, j, h, std::vector<double>(d, k));
      run.set_key_row(Slot::v, 0, j, h, std::vector<double>(dv, v));
    }
  }
  run.remember();
}

class Future : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Types, Future, ::testing::Values("fp32", "fp16", "bf16"));

TEST_P(Future, ChangesNoBitOfThePast) {
  for (const char* wishes : {"", " tile_q=16 tile_kv=16", " tile_q=32 tile_kv=64 splits=2"}) {
    const std::string line =
        std::string("attention sq=130 hq=4 hkv=2 d=32 causal lse seed=1 dtype=") + GetParam() + wishes;
    SequenceRun clean(line);
    clean.run();
    for (const std::int64_t first : {1, 50, 64, 129}) {
      SequenceRun run(line);
      set_non_finite_keys(run, first, 130, 30.0, -30.0);
      run.run();
      EXPECT_TRUE(same_bits(clean.query_rows(Slot::o, 0, first), run.query_rows(Slot::o, 0, first))) << first << wishes;
      EXPECT_TRUE(same_bits(clean.lse_rows(0, first), run.lse_rows(0, first))) << first << wishes;
      EXPECT_FALSE(same_bits(clean.query_rows(Slot::o, 0), run.query_rows(Slot::o, 0)));
    }
  }
}

TEST_P(Future, LeaksNoNaNAndNoInfinity) {
  const std::string line = std::string("attention sq=130 hq=4 hkv=2 d=32 causal lse seed=1 dtype=") + GetParam();
  SequenceRun clean(line);
  clean.run();
  for (const std::int64_t first : {1, 50, 64, 129}) {
    for (const double non_finite : {kNaN, std::numeric_limits<double>::infinity()}) {
      SequenceRun run(line);
      set_non_finite_keys(run, first, 130, non_finite, non_finite);
      run.run();
      EXPECT_TRUE(same_bits(clean.query_rows(Slot::o, 0, first), run.query_rows(Slot::o, 0, first)))
          << first << " " << non_finite;
      EXPECT_TRUE(same_bits(clean.lse_rows(0, first), run.lse_rows(0, first))) << first << " " << non_finite;
      for (const double x : run.query_row(Slot::o, 0, 129, 0)) EXPECT_TRUE(std::isnan(x));
    }
  }
}

TEST_P(Future, ChangesNoBitOfPastGradients) {
  const std::string line =
      std::string("attention pass=backward sq=90 hq=4 hkv=2 d=32 causal deterministic seed=2 dtype=") + GetParam();
  constexpr std::int64_t kFirst = 60;
  SequenceRun clean(line);
  clean.run();
  SequenceRun run(line);
  set_non_finite_keys(run, kFirst, 90, 3.0, -3.0);
  run.run();
  EXPECT_TRUE(same_bits(clean.query_rows(Slot::dq, 0, kFirst), run.query_rows(Slot::dq, 0, kFirst)));
  // Keys of the past are seen by rows of the future, whose gradients are others now.
  EXPECT_FALSE(same_bits(clean.key_rows(Slot::dk, 0), run.key_rows(Slot::dk, 0)));
}

TEST(Hidden, KeysOutsideBandListAndMaskLeakNothing) {
  for (const char* mask : {"window=5:5", "mask=document", "mask=checkerboard", "mask=prefix", "compressed_causal=2:2",
                           "block=16x16 list=indices density=0.4", "block=8x24 list=bitmask density=0.4",
                           "block=17x5 list=transposed density=0.3", "window=-20:*", "window=*:-30", "chunk=30"}) {
    for (const char* pass : {"attention lse ", "attention pass=backward deterministic "}) {
      const std::string line = pass + std::string("sq=80 hq=2 d=16 seed=5 tile_q=16 tile_kv=16 ") + mask;
      SequenceRun clean(line);
      clean.run();
      SequenceRun finite(line);
      set_non_finite_keys(finite, 37, 38, 30.0, 30.0);
      finite.run();
      SequenceRun non_finite(line);
      set_non_finite_keys(non_finite, 37, 38, kNaN, kNaN);
      non_finite.run();
      const Slot output = clean.problem().pass == Pass::forward ? Slot::o : Slot::dq;
      std::int64_t blind = 0;
      for (std::int64_t i = 0; i < 80; ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
          const std::vector<double> row = clean.query_row(output, 0, i, h);
          if (!same_bits(row, finite.query_row(output, 0, i, h))) {
            // It sees the key, so the NaN must reach it.
            for (const double x : non_finite.query_row(output, 0, i, h))
              EXPECT_TRUE(std::isnan(x)) << line << " row " << i;
            continue;
          }
          ++blind;
          EXPECT_LT(largest_difference(row, non_finite.query_row(output, 0, i, h)), 1e-5) << line << " row " << i;
        }
      }
      EXPECT_GT(blind, 0) << line;
      EXPECT_LT(blind, 160) << line;
    }
  }
}

}  // namespace
}  // namespace tessera::test
