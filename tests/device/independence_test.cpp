// SPDX-License-Identifier: Apache-2.0
// What a row's results do not depend on, bit for bit: masked keys, other rows and heads, other sequences of the batch.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "device/place.h"
#include "device/placed_sequences.h"

namespace tessera::test {
namespace {

class Independence : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, Independence, every_place(), name_of_place);

// Keys that some rows of a block see and others do not, far larger than all before.
TEST_P(Independence, WhatIsMaskedChangesNoBit) {
  for (const char* shape : {"sq=400 sk=400 hq=2 d=64 dtype=bf16", "sq=300 sk=300 hq=2 d=128 dtype=fp16 window=90:0",
                            "sq=300 sk=300 hq=2 d=256 dtype=bf16 softcap=20",
                            "sq=300 sk=300 hq=2 d=128 dtype=bf16 list=indices block=64x64 density=1"}) {
    SCOPED_TRACE(shape);
    const bool windowed = std::string(shape).find("window=") != std::string::npos;
    const std::string line = std::string("attention lse seed=12 ") + (windowed ? "" : "causal ") + shape;
    SequenceRun before(line);
    ASSERT_NO_FATAL_FAILURE(run_on(target_, before, ""));
    SequenceRun after(line);
    const std::int64_t d = after.problem().head_dim_qk;
    constexpr std::int64_t kSame = 137;  // keys; within a tile of rows and of keys
    for (std::int64_t j = kSame; j < after.problem().kv.seqlen; ++j) {
      for (std::int64_t h = 0; h < 2; ++h) {
        after.set_key_row(Slot::k, 0, j, h, std::vector<double>(static_cast<std::size_t>(d), j % 2 == 0 ? 30 : -30));
        after.set_key_row(Slot::v, 0, j, h, std::vector<double>(static_cast<std::size_t>(d), 100));
      }
    }
    after.remember();
    ASSERT_NO_FATAL_FAILURE(run_on(target_, after, ""));
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < kSame; ++i) {
        ASSERT_TRUE(same_bits(before.query_row(Slot::o, 0, i, h), after.query_row(Slot::o, 0, i, h)))
            << "row " << i << " of head " << h;
        ASSERT_EQ(before.lse(Slot::lse, 0, i, h), after.lse(Slot::lse, 0, i, h)) << "row " << i << " of head " << h;
      }
    }
  }
}

// Queries whose scores rise by far from tile to tile, beside others in one warp: what that asks for touches no other
// row.
TEST_P(Independence, RowsDoNotKnowEachOther) {
  for (const char* shape : {"d=64 dtype=bf16", "d=128 dtype=fp16", "d=256 dtype=bf16", "d=64 dtype=bf16 causal",
                            "d=128 dtype=bf16 softcap=20", "d=128 dtype=bf16 list=indices block=64x64 density=1",
                            "d=64 dtype=bf16 causal alibi", "d=128 dtype=fp16 causal alibi"}) {
    SCOPED_TRACE(shape);
    const std::string line = std::string("attention sq=700 sk=700 hq=2 lse seed=13 ") + shape;
    SequenceRun calm(line);
    ASSERT_NO_FATAL_FAILURE(run_on(target_, calm, ""));
    SequenceRun mixed(line);
    const std::int64_t d = mixed.problem().head_dim_qk;
    const auto is_wild = [](std::int64_t i) { return i % 3 == 0; };
    for (std::int64_t i = 0; i < 700; ++i) {
      if (is_wild(i)) mixed.set_query_row(Slot::q, 0, i, 0, std::vector<double>(static_cast<std::size_t>(d), 40));
    }
    mixed.remember();
    ASSERT_NO_FATAL_FAILURE(run_on(target_, mixed, ""));
    for (std::int64_t i = 0; i < 700; ++i) {
      for (std::int64_t h = 0; h < 2; ++h) {
        if (h == 0 && is_wild(i)) continue;
        ASSERT_TRUE(same_bits(calm.query_row(Slot::o, 0, i, h), mixed.query_row(Slot::o, 0, i, h)))
            << "row " << i << " of head " << h;
        ASSERT_EQ(calm.lse(Slot::lse, 0, i, h), mixed.lse(Slot::lse, 0, i, h)) << "row " << i << " of head " << h;
      }
    }
  }
}

// Slopes so steep that a row is computed again, and ordinary ones of another head whose rows share its tiles.
TEST_P(Independence, RowsDoNotKnowOfSteepSlopes) {
  for (const char* shape : {"d=64 dtype=bf16", "d=128 dtype=fp16", "d=256 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    const std::string line = std::string("attention sq=150 sk=300 hq=2 hkv=1 causal alibi lse seed=13 ") + shape;
    SequenceRun calm(line);
    SequenceRun mixed(line);
    for (SequenceRun* run : {&calm, &mixed}) {
      run->set_alibi_slope(0, 0.25);
      run->set_alibi_slope(1, run == &mixed ? 30 : 0.5);
      run->remember();
      ASSERT_NO_FATAL_FAILURE(run_on(target_, *run, ""));
    }
    for (std::int64_t i = 0; i < 150; ++i) {
      ASSERT_TRUE(same_bits(calm.query_row(Slot::o, 0, i, 0), mixed.query_row(Slot::o, 0, i, 0))) << "row " << i;
      ASSERT_EQ(calm.lse(Slot::lse, 0, i, 0), mixed.lse(Slot::lse, 0, i, 0)) << "row " << i;
    }
  }
}

// With plans of their own: what batch_invariant promises is a choice that the batch does not enter.
TEST_P(Independence, AloneIsAsInABatch) {
  const std::string common = " hq=8 hkv=2 d=64 dtype=bf16 causal lse batch_invariant";
  for (const char* keys : {"kv=varlen", "kv=table page=16 pages=shuffled"}) {
    for (const char* rows : {"sq=3 sk=700", "sq=90 sk=300"}) {
      SCOPED_TRACE(std::string(keys) + " " + rows);
      const std::string form = std::string("attention ") + keys + " " + rows + common;
      SequenceRun batch(form + " b=5 seed=10 lens_k=300,7,120,0,64");
      ASSERT_NO_FATAL_FAILURE(run_on(target_, batch, ""));
      for (std::int64_t b = 0; b < 5; ++b) {
        SequenceRun alone(form + " b=1 seed=11 lens_k=" + std::to_string(batch.key_length(b)));
        const auto from = [b](std::int64_t, std::int64_t h) { return Source{b, h}; };
        alone.copy_inputs(batch, from, from);
        ASSERT_NO_FATAL_FAILURE(run_on(target_, alone, ""));
        expect_same(alone, 0, batch, b);
      }
    }
  }
}

// The second has few keys and many rows, which blocks would share if one sequence were alone.
TEST_P(Independence, GradientsAloneAreAsInABatch) {
  for (const auto& [form, lengths, keys] :
       {std::tuple{"sq=300 sk=300 hq=4 hkv=2 d=64", std::array{300, 7, 120}, std::array{300, 7, 120}},
        std::tuple{"sq=2100 sk=200 hq=4 hkv=1 d=128", std::array{90, 2100, 1}, std::array{200, 170, 30}}}) {
    SCOPED_TRACE(form);
    const std::string common =
        std::string("attention pass=backward layout=varlen kv=varlen dtype=bf16 causal batch_invariant ") + form;
    const auto lens = [&, &lengths = lengths, &keys = keys](std::size_t first, std::size_t end) {
      std::string q = " lens_q=", k = " lens_k=";
      for (std::size_t b = first; b < end; ++b) {
        q += (b > first ? "," : "") + std::to_string(lengths[b]);
        k += (b > first ? "," : "") + std::to_string(keys[b]);
      }
      return q + k;
    };
    SequenceRun batch(common + " b=3 seed=10" + lens(0, 3));
    ASSERT_NO_FATAL_FAILURE(run_on(target_, batch, ""));
    for (std::int64_t b = 0; b < 3; ++b) {
      SequenceRun alone(common + " b=1 seed=11" + lens(static_cast<std::size_t>(b), static_cast<std::size_t>(b) + 1));
      const auto from = [b](std::int64_t, std::int64_t h) { return Source{b, h}; };
      alone.copy_inputs(batch, from, from);
      ASSERT_NO_FATAL_FAILURE(run_on(target_, alone, ""));
      EXPECT_TRUE(same_bits(alone.query_rows(Slot::dq, 0), batch.query_rows(Slot::dq, b))) << "dq of sequence " << b;
      for (const Slot slot : {Slot::dk, Slot::dv}) {
        EXPECT_TRUE(same_bits(alone.key_rows(slot, 0), batch.key_rows(slot, b))) << "dk or dv of sequence " << b;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test
