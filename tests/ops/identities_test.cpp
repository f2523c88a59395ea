// SPDX-License-Identifier: Apache-2.0
// The same attention written in two ways: bit for bit where that is promised.
#include <gtest/gtest.h>

#include <cmath>

#include "cases/trial.h"
#include "cpu/reference/reference.h"
#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

class EveryType : public ::testing::TestWithParam<const char*> {
 protected:
  [[nodiscard]] std::string types() const { return std::string(" dtype=") + GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Types, EveryType, ::testing::Values("fp32", "fp16", "bf16"));

TEST_P(EveryType, PagedIsVarlenIsDense) {
  const std::string common = types() + " hq=4 hkv=2 d=32 causal lse seed=3";
  SequenceRun varlen("attention b=3 sq=40 sk=70 layout=varlen lens_q=40,7,23 lens_k=70,11,40" + common);
  varlen.run();
  for (const char* keys : {"kv=varlen lens_k=70,11,40", "kv=dense seqused_k lens_k=70,11,40",
                           "kv=table page=16 pages=20 lens_k=70,11,40 pages=shuffled",
                           "kv=table page=1 lens_k=70,11,40 pages=shuffled", "kv=csr page=7 lens_k=70,11,40"}) {
    for (const char* queries : {"layout=varlen lens_q=40,7,23", "seqused_q lens_q=40,7,23"}) {
      SequenceRun other(std::string("attention b=3 sq=40 sk=70 ") + keys + " " + queries + common);
      other.copy_inputs(varlen);
      other.run();
      for (std::int64_t b = 0; b < 3; ++b) {
        EXPECT_TRUE(same_bits(varlen.query_rows(Slot::o, b), other.query_rows(Slot::o, b))) << keys << " " << queries;
        EXPECT_TRUE(same_bits(varlen.lse_rows(b), other.lse_rows(b))) << keys << " " << queries;
      }
    }
  }
}

TEST_P(EveryType, VarlenBackwardIsDense) {
  const std::string common = types() + " b=3 sq=40 sk=50 hq=4 hkv=2 d=32 causal deterministic seed=4";
  SequenceRun varlen("attention pass=backward layout=varlen lens_q=40,7,23 lens_k=50,11,40" + common);
  SequenceRun dense("attention pass=backward seqused_q seqused_k lens_q=40,7,23 lens_k=50,11,40" + common);
  dense.copy_inputs(varlen);
  varlen.run();
  dense.run();
  for (std::int64_t b = 0; b < 3; ++b) {
    EXPECT_TRUE(same_bits(varlen.query_rows(Slot::dq, b), dense.query_rows(Slot::dq, b)));
    EXPECT_TRUE(same_bits(varlen.key_rows(Slot::dk, b), dense.key_rows(Slot::dk, b)));
    EXPECT_TRUE(same_bits(varlen.key_rows(Slot::dv, b), dense.key_rows(Slot::dv, b)));
  }
}

// The output of a query with one key is its value, rounded to the nearest, ties to even, on every instruction set.
TEST(Outputs, AreRoundedToEven) {
  for (const std::string& isa : cases::tested_isas()) {
    for (const char* type : {"bf16", "fp16"}) {
      SequenceRun run(std::string("attention sq=1 sk=1 d=32 dtype=fp32:fp32:fp32:") + type + " isa=" + isa);
      const int bits = type[0] == 'b' ? 8 : 11;  // of a number's significand
      std::vector<double> values, rounded;
      for (int i = 0; i < 32; ++i) {  // 1 + i/4 of a unit in the last place, of either sign
        const double unit = std::ldexp(1.0, 1 - bits);
        values.push_back((i % 2 == 0 ? 1 : -1) * (1 + i / 4.0 * unit));
        rounded.push_back((i % 2 == 0 ? 1 : -1) * (1 + std::nearbyint(i / 4.0) * unit));
      }
      run.set_key_row(Slot::v, 0, 0, 0, values);
      run.remember();
      run.run();
      EXPECT_TRUE(same_bits(run.query_row(Slot::o, 0, 0, 0), rounded)) << isa << " " << type;
    }
  }
}

// Rounding errors of long sums in one chain would grow with the square root of the keys: 1.6e-6 here. Where keys are
// read in place, too.
TEST(LongSums, AreSumsOfTiles) {
  for (const std::string& isa : cases::tested_isas()) {
    for (const char* rows : {"sq=64", "sq=1"}) {
      SequenceRun run(std::string("attention sk=8192 hq=2 d=32 lse seed=8 ") + rows + " isa=" + isa);
      const reference::Result exact = reference::compute(run.problem(), run.bindings(), reference::Arithmetic::oracle);
      run.run();
      double error = 0, norm = 0;
      const Tensor& o = run.bindings()[Slot::o];
      reference::for_each_element(o, [&](std::int64_t index, std::int64_t offset) {
        const double value = exact[Slot::o].values[static_cast<std::size_t>(index)];
        error += std::pow(reference::read(o, offset) - value, 2);
        norm += value * value;
      });
      EXPECT_LT(std::sqrt(error / norm), 6e-7) << isa << " " << rows;
    }
  }
}

TEST_P(EveryType, PackedHeadsAreUnpackedHeads) {
  const std::string common = types() + " b=2 sq=37 sk=90 hq=6 d=32 causal lse seed=5 tile_kv=32";
  SequenceRun packed("attention hkv=2" + common);
  SequenceRun expanded("attention hkv=6" + common);
  expanded.copy_inputs(
      packed,
      [](std::int64_t b, std::int64_t h) {
        return Source{b, h};
      },
      [](std::int64_t b, std::int64_t h) {
        return Source{b, h / 3};
      });
  packed.run();
  expanded.run();
  for (std::int64_t b = 0; b < 2; ++b) {
    EXPECT_TRUE(same_bits(packed.query_rows(Slot::o, b), expanded.query_rows(Slot::o, b)));
    EXPECT_TRUE(same_bits(packed.lse_rows(b), expanded.lse_rows(b)));
  }
}

TEST_P(EveryType, MemoryLayoutChangesNoBit) {
  const std::string common = types() + " b=2 sq=37 sk=60 hq=4 hkv=2 d=24 causal lse seed=6";
  SequenceRun packed("attention" + common);
  packed.run();
  for (const char* strides : {" strides=bhsd", " strides=gaps"}) {
    SequenceRun other("attention" + common + strides);
    other.copy_inputs(packed);
    other.run();
    for (std::int64_t b = 0; b < 2; ++b) {
      EXPECT_TRUE(same_bits(packed.query_rows(Slot::o, b), other.query_rows(Slot::o, b))) << strides;
      EXPECT_TRUE(same_bits(packed.lse_rows(b), other.lse_rows(b))) << strides;
    }
  }
}

TEST_P(EveryType, BatchPermutation) {
  for (const char* pass : {"attention lse", "attention pass=backward deterministic"}) {
    const std::string common = std::string(pass) + types() + " b=3 sq=40 sk=50 layout=varlen hq=4 hkv=2 d=32 causal";
    SequenceRun one(common + " lens_q=40,7,23 lens_k=50,11,40 seed=7");
    SequenceRun other(common + " lens_q=23,40,7 lens_k=40,50,11 seed=8");
    const auto from = [](std::int64_t b, std::int64_t h) { return Source{(b + 2) % 3, h}; };
    other.copy_inputs(one, from, from);
    one.run();
    other.run();
    for (std::int64_t b = 0; b < 3; ++b) {
      const std::int64_t source = (b + 2) % 3;
      if (one.problem().pass == Pass::forward) {
        EXPECT_TRUE(same_bits(other.query_rows(Slot::o, b), one.query_rows(Slot::o, source)));
        EXPECT_TRUE(same_bits(other.lse_rows(b), one.lse_rows(source)));
        continue;
      }
      EXPECT_TRUE(same_bits(other.query_rows(Slot::dq, b), one.query_rows(Slot::dq, source)));
      EXPECT_TRUE(same_bits(other.key_rows(Slot::dk, b), one.key_rows(Slot::dk, source)));
      EXPECT_TRUE(same_bits(other.key_rows(Slot::dv, b), one.key_rows(Slot::dv, source)));
    }
  }
}

TEST_P(EveryType, PrefixUnderCausalMask) {
  const std::string common = types() + " hq=4 hkv=2 d=32 causal lse batch_invariant seed=9";
  SequenceRun whole("attention sq=150" + common);
  whole.run();
  for (const std::int64_t length : {1, 40, 64, 101}) {
    SequenceRun prefix("attention sq=" + std::to_string(length) + common);
    prefix.copy_inputs(whole);
    prefix.run();
    EXPECT_TRUE(same_bits(prefix.query_rows(Slot::o, 0), whole.query_rows(Slot::o, 0, length))) << length;
    EXPECT_TRUE(same_bits(prefix.lse_rows(0), whole.lse_rows(0, length))) << length;
  }
}

TEST_P(EveryType, AloneIsAsInABatch) {
  const std::string common = types() + " hq=4 hkv=2 d=32 causal lse batch_invariant threads=2";
  SequenceRun batch("attention b=4 sq=3 sk=300 kv=varlen lens_k=300,7,120,64 seed=10" + common);
  batch.run();
  for (std::int64_t b = 0; b < 4; ++b) {
    SequenceRun alone("attention b=1 sq=3 sk=300 kv=varlen seed=11 lens_k=" + std::to_string(batch.key_length(b)) +
                      common);
    const auto from = [b](std::int64_t, std::int64_t h) { return Source{b, h}; };
    alone.copy_inputs(batch, from, from);
    alone.run();
    EXPECT_TRUE(same_bits(alone.query_rows(Slot::o, 0), batch.query_rows(Slot::o, b))) << b;
    EXPECT_TRUE(same_bits(alone.lse_rows(0), batch.lse_rows(b))) << b;
  }
}

TEST_P(EveryType, AloneIsAsInABatchBackward) {
  const std::string common = types() + " hq=4 hkv=2 d=32 causal batch_invariant threads=8 tile_kv=32";
  SequenceRun batch("attention pass=backward b=4 sq=40 sk=300 kv=varlen lens_k=300,7,120,64 seed=10" + common);
  batch.run();
  for (std::int64_t b = 0; b < 4; ++b) {
    SequenceRun alone("attention pass=backward b=1 sq=40 sk=300 kv=varlen seed=11 lens_k=" +
                      std::to_string(batch.key_length(b)) + common);
    const auto from = [b](std::int64_t, std::int64_t h) { return Source{b, h}; };
    alone.copy_inputs(batch, from, from);
    alone.run();
    EXPECT_TRUE(same_bits(alone.query_rows(Slot::dq, 0), batch.query_rows(Slot::dq, b))) << b;
    EXPECT_TRUE(same_bits(alone.key_rows(Slot::dk, 0), batch.key_rows(Slot::dk, b))) << b;
    EXPECT_TRUE(same_bits(alone.key_rows(Slot::dv, 0), batch.key_rows(Slot::dv, b))) << b;
  }
}

// The last rows of a problem of many, alone: few queries read keys where they lie, and the threads decide how many
// heads walk them together.
TEST_P(EveryType, FewQueriesAreManyQueries) {
  for (const char* isa : {"", " isa=emulated_avx512_bf16", " isa=emulated_amx_bf16"}) {
    for (const char* shape :
         {" hq=4 hkv=2 d=32 window=91:0", " hq=20 d=64 dv=48 causal softcap=5", " hq=16 hkv=2 d=32 causal",
          " hq=1 d=32", " hq=2 d=64 scale=-0.3 window=77:0", " hq=3 hkv=1 d=160 dv=16 window=60:0 tile_kv=33 alibi"}) {
      const std::string common = types() + isa + shape + " sk=301 lse batch_invariant seed=15";
      SequenceRun many("attention sq=70" + common);
      many.run();
      const std::int64_t heads = many.problem().heads_q;
      for (const std::int64_t count : {1, 2, 3, 4}) {
        SequenceRun few("attention sq=" + std::to_string(count) + common);
        few.copy_inputs(many);
        const std::int64_t first = many.query_length(0) - count;
        for (std::int64_t i = 0; i < count; ++i) {
          for (std::int64_t h = 0; h < heads; ++h) {
            few.set_query_row(Slot::q, 0, i, h, many.query_row(Slot::q, 0, first + i, h));
          }
        }
        few.remember();
        for (const int threads : {1, 2, 5}) {
          few.run(threads);
          for (std::int64_t i = 0; i < count; ++i) {
            for (std::int64_t h = 0; h < heads; ++h) {
              EXPECT_TRUE(same_bits(few.query_row(Slot::o, 0, i, h), many.query_row(Slot::o, 0, first + i, h)))
                  << common << " " << count << " " << threads;
              EXPECT_EQ(few.lse(Slot::lse, 0, i, h), many.lse(Slot::lse, 0, first + i, h));
            }
          }
        }
      }
    }
  }
}

TEST_P(EveryType, ListOfAllTilesIsDense) {
  const std::string common = types() + " b=2 sq=70 sk=90 hq=4 hkv=2 d=32 causal lse tile_q=16 tile_kv=32 seed=12";
  SequenceRun dense("attention" + common);
  dense.run();
  for (const char* list : {"list=indices", "list=bitmask:kv:1", "list=transposed:1:b"}) {
    SequenceRun listed("attention block=16x32 density=1 " + (list + common));
    listed.copy_inputs(dense);
    listed.run();
    for (std::int64_t b = 0; b < 2; ++b) {
      EXPECT_TRUE(same_bits(dense.query_rows(Slot::o, b), listed.query_rows(Slot::o, b))) << list;
      EXPECT_TRUE(same_bits(dense.lse_rows(b), listed.lse_rows(b))) << list;
    }
  }
}

TEST(Determinism, BackwardRepeatsOverRunsAndThreads) {
  for (const char* dtype : {"fp32", "bf16"}) {
    SequenceRun run(std::string("attention pass=backward b=2 sq=120 sk=110 hq=4 hkv=2 d=32 causal sink deterministic "
                                "tile_q=16 tile_kv=32 seed=13 dtype=") +
                    dtype);
    std::vector<std::vector<double>> first;
    for (const int threads : {1, 1, 2, 3, 4}) {
      run.run(threads);
      std::vector<std::vector<double>> now;
      for (std::int64_t b = 0; b < 2; ++b) {
        now.push_back(run.query_rows(Slot::dq, b));
        now.push_back(run.key_rows(Slot::dk, b));
        now.push_back(run.key_rows(Slot::dv, b));
      }
      std::vector<double>& dsink = now.emplace_back();
      for (std::int64_t h = 0; h < 4; ++h) dsink.push_back(reference::read(run.bindings()[Slot::dsink], h));
      if (first.empty()) first = now;
      for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(same_bits(first[i], now[i])) << threads << " " << i;
    }
  }
}

/// Four threads share the keys of one head; which of them is done first must not show, whether the promise was asked
/// for or not.
TEST(Determinism, BackwardInPartsRepeatsOverRuns) {
  std::vector<std::vector<double>> first;
  for (const char* promise : {"", " deterministic"}) {
    SequenceRun run(std::string("attention pass=backward sq=90 sk=260 hq=2 hkv=1 d=32 dtype=bf16 tile_q=16 tile_kv=16 "
                                "seed=15") +
                    promise);
    for (int time = 0; time < 10; ++time) {
      run.run(4);
      const std::vector<std::vector<double>> now{run.query_rows(Slot::dq, 0), run.key_rows(Slot::dk, 0),
                                                 run.key_rows(Slot::dv, 0)};
      if (first.empty()) first = now;
      for (std::size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(same_bits(first[i], now[i])) << promise << time << i;
    }
  }
}

TEST(Determinism, ForwardRepeatsOverRunsAndThreads) {
  SequenceRun run("attention b=2 sq=120 sk=110 hq=4 hkv=2 d=32 causal lse tile_q=16 tile_kv=32 splits=2 seed=14");
  run.run(1);
  const std::vector<double> o = run.query_rows(Slot::o, 1);
  for (const int threads : {1, 2, 3}) {
    run.run(threads);
    EXPECT_TRUE(same_bits(o, run.query_rows(Slot::o, 1))) << threads;
  }
}

}  // namespace
}  // namespace tessera::test
