// SPDX-License-Identifier: Apache-2.0
// The same attention written in two ways, and the same run many times: bit for bit. Tiles of keys and splits decide in
// which order a row's keys are added, so both are wished for where the forms would choose different ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#include "device/place.h"
#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

void run_on(const Target& target, SequenceRun& run, const std::string& wishes) {
  run.inputs().restore();
  PlacedRun placed(run.inputs(), make_plan(run.problem(), target, Wishes::parse(wishes)));
  ASSERT_EQ(placed.run(), "");
  // Two runs that write nothing are equal too.
  for (std::int64_t b = 0; b < run.problem().batch; ++b) {
    const std::vector<double> rows = run.query_rows(Slot::o, b);
    ASSERT_TRUE(std::all_of(rows.begin(), rows.end(), [](double x) { return std::isfinite(x); })) << "o of " << b;
  }
}

/// Wishes under which forms are equal: on a GPU of the implementation that every place has.
std::string of_one_kernel(const Target& target, const std::string& wishes) {
  return is_on_gpu(target) ? "implementation=cuda.fwd_mma " + wishes : wishes;
}

/// Every output row of sequence b of `one` and of sequence `other_b` of `other`.
void expect_same(const SequenceRun& one, std::int64_t b, const SequenceRun& other, std::int64_t other_b) {
  ASSERT_EQ(one.query_length(b), other.query_length(other_b));
  EXPECT_TRUE(same_bits(one.query_rows(Slot::o, b), other.query_rows(Slot::o, other_b))) << "o of sequence " << b;
  EXPECT_TRUE(same_bits(one.lse_rows(b), other.lse_rows(other_b))) << "lse of sequence " << b;
}

class Identity : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, Identity, every_place(), name_of_place);

TEST_P(Identity, PagedIsVarlenIsDense) {
  for (const char* common : {" hq=4 hkv=2 d=64 dtype=bf16 causal lse seed=3", " hq=4 hkv=4 d=128 dtype=fp16 lse seed=4",
                             " hq=2 hkv=1 d=96 dtype=bf16 window=90:20 softcap=9 sink lse seed=5"}) {
    for (const char* wishes : {"tile_kv=64 splits=1", "tile_kv=64 splits=3"}) {
      SequenceRun varlen("attention b=3 sq=70 sk=330 layout=varlen lens_q=70,7,43 lens_k=330,11,200" +
                         std::string(common));
      ASSERT_NO_FATAL_FAILURE(run_on(target_, varlen, of_one_kernel(target_, wishes)));
      for (const char* keys :
           {"kv=varlen lens_k=330,11,200", "kv=dense seqused_k lens_k=330,11,200",
            "kv=table page=16 lens_k=330,11,200 pages=shuffled", "kv=table page=1 lens_k=330,11,200 pages=shuffled",
            "kv=table page=256 lens_k=330,11,200", "kv=csr page=7 lens_k=330,11,200 pages=shuffled",
            "kv=csr page=64 lens_k=330,11,200"}) {
        for (const char* queries : {"layout=varlen lens_q=70,7,43", "seqused_q lens_q=70,7,43"}) {
          SCOPED_TRACE(std::string(keys) + " " + queries + common + ", " + wishes);
          SequenceRun other(std::string("attention b=3 sq=70 sk=330 ") + keys + " " + queries + common);
          other.copy_inputs(varlen);
          ASSERT_NO_FATAL_FAILURE(run_on(target_, other, of_one_kernel(target_, wishes)));
          for (std::int64_t b = 0; b < 3; ++b) expect_same(varlen, b, other, b);
        }
      }
    }
  }
}

TEST_P(Identity, PagedIsVarlenIsDenseAtWideHeads) {
  for (const char* common :
       {" hq=4 hkv=2 d=512 dtype=bf16 causal lse seed=7", " hq=2 d=192 dv=512 dtype=fp16 lse seed=8"}) {
    SequenceRun varlen("attention b=2 sq=70 sk=130 layout=varlen lens_q=70,43 lens_k=130,77" + std::string(common));
    ASSERT_NO_FATAL_FAILURE(run_on(target_, varlen, "tile_kv=16 splits=1"));
    for (const char* keys : {"kv=dense seqused_k", "kv=table page=16 pages=shuffled", "kv=csr page=7 pages=shuffled"}) {
      SCOPED_TRACE(std::string(keys) + common);
      SequenceRun other(std::string("attention b=2 sq=70 sk=130 seqused_q lens_q=70,43 lens_k=130,77 ") + keys +
                        common);
      other.copy_inputs(varlen);
      ASSERT_NO_FATAL_FAILURE(run_on(target_, other, "tile_kv=16 splits=1"));
      for (std::int64_t b = 0; b < 2; ++b) expect_same(varlen, b, other, b);
    }
  }
}

TEST_P(Identity, VarlenIsDenseInPlansOfTheirOwn) {
  const std::string common = " b=3 sq=130 sk=200 hq=4 hkv=2 d=64 dtype=bf16 causal lse seed=6";
  SequenceRun varlen("attention layout=varlen lens_q=130,1,77 lens_k=200,199,3" + common);
  SequenceRun dense("attention seqused_q seqused_k lens_q=130,1,77 lens_k=200,199,3" + common);
  dense.copy_inputs(varlen);
  ASSERT_NO_FATAL_FAILURE(run_on(target_, varlen, ""));
  ASSERT_NO_FATAL_FAILURE(run_on(target_, dense, ""));
  for (std::int64_t b = 0; b < 3; ++b) expect_same(varlen, b, dense, b);
}

// Splits share the keys that a block's rows see, so with several blocks of a causal problem only one split is equal.
TEST_P(Identity, PackedHeadsAreUnpackedHeads) {
  for (const auto& [shape, wishes] : {std::pair(" sq=37 sk=290 hq=6 d=64", "tile_kv=64 splits=1"),
                                      std::pair(" sq=37 sk=290 hq=6 d=64", "tile_kv=64 splits=2"),
                                      std::pair(" sq=1 sk=500 hq=6 d=128", "tile_kv=64 splits=3"),
                                      std::pair(" sq=150 sk=150 hq=6 d=32", "tile_kv=64 splits=1")}) {
    SCOPED_TRACE(std::string(shape) + ", " + wishes);
    const std::string common = " b=2 dtype=bf16 causal sink lse seed=5" + std::string(shape);
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
    ASSERT_NO_FATAL_FAILURE(run_on(target_, packed, of_one_kernel(target_, wishes)));
    ASSERT_NO_FATAL_FAILURE(run_on(target_, expanded, of_one_kernel(target_, wishes)));
    for (std::int64_t b = 0; b < 2; ++b) expect_same(packed, b, expanded, b);
  }
}

TEST_P(Identity, MemoryLayoutChangesNoBit) {
  const std::string common = " b=2 sq=37 sk=160 hq=4 hkv=2 d=64 dtype=bf16 causal lse seed=6";
  SequenceRun packed("attention" + common);
  ASSERT_NO_FATAL_FAILURE(run_on(target_, packed, ""));
  for (const char* strides : {" strides=bhsd", " strides=gaps"}) {
    SCOPED_TRACE(strides);
    SequenceRun other("attention" + common + strides);
    other.copy_inputs(packed);
    ASSERT_NO_FATAL_FAILURE(run_on(target_, other, ""));
    for (std::int64_t b = 0; b < 2; ++b) expect_same(packed, b, other, b);
  }
}

// Rows, heads and sequences of Q that lie in one place, or backwards.
TEST_P(Identity, QueriesMayShareMemory) {
  const auto expect_copies = [&](const std::string& heads, const std::function<void(Tensor&)>& change) {
    const std::string line = "attention b=2 sq=150 sk=200 d=64 dtype=bf16 causal lse seed=9 " + heads;
    SequenceRun shared(line);
    change(shared.bindings()[Slot::q]);
    SequenceRun copied(line);
    copied.copy_inputs(shared);
    ASSERT_NO_FATAL_FAILURE(run_on(target_, shared, ""));
    ASSERT_NO_FATAL_FAILURE(run_on(target_, copied, ""));
    for (std::int64_t b = 0; b < 2; ++b) expect_same(shared, b, copied, b);
  };
  for (const char* heads : {"hq=4", "hq=4 hkv=2", "hq=6 hkv=2"}) {
    SCOPED_TRACE(heads);
    for (const std::size_t dimension : {0U, 1U, 2U}) {
      SCOPED_TRACE(dimension);
      ASSERT_NO_FATAL_FAILURE(expect_copies(heads, [&](Tensor& q) { q.strides[dimension] = 0; }));
    }
    if (placement() == cases::Placement::apart) continue;  // which places what lies behind a tensor's first element
    ASSERT_NO_FATAL_FAILURE(expect_copies(heads, [](Tensor& q) {
      q.byte_offset += (q.shape[1] - 1) * q.strides[1] * static_cast<std::int64_t>(size_of(q.dtype));
      q.strides[1] = -q.strides[1];
    }));
  }
}

// Keys that some rows of a block see and others do not, far larger than all before.
TEST_P(Identity, WhatIsMaskedChangesNoBit) {
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
TEST_P(Identity, RowsDoNotKnowEachOther) {
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
TEST_P(Identity, RowsDoNotKnowOfSteepSlopes) {
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
TEST_P(Identity, AloneIsAsInABatch) {
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
TEST_P(Identity, GradientsAloneAreAsInABatch) {
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

TEST_P(Identity, EveryRunGivesTheSameBits) {
  const int repetitions = is_on_gpu(target_) ? 1000 : 5;
  for (const char* line :
       {"attention b=2 sq=200 sk=200 hq=4 hkv=2 d=64 dtype=bf16 causal lse",
        "attention b=2 sq=130 sk=300 layout=varlen lens_q=130,60 lens_k=300,171 hq=2 d=128 dtype=bf16 lse",
        "attention b=2 sq=1 sk=900 hq=8 hkv=2 d=128 dtype=bf16 kv=table page=16 lens_k=900,555 lse splits=6",
        "attention sq=150 sk=300 hq=2 d=64 dtype=fp16 block=32x32 list=indices mass=mean next=bitmask threshold=0.05 "
        "lse",
        "attention sq=100 sk=200 hq=2 d=64 dtype=bf16 dropout=0.3 drop_seed=9 softcap=5 lse",
        "attention sq=64 sk=300 hq=2 d=256 dtype=bf16 score=relative mask=document lse",
        "attention pass=backward b=2 sq=200 sk=200 hq=4 hkv=2 d=64 dtype=bf16 causal sink dropout=0.2 drop_seed=3 "
        "deterministic",
        "attention pass=backward sq=150 sk=530 hq=2 d=128 dtype=fp16 grad=fp32 deterministic",
        "attention pass=backward sq=700 sk=900 hq=6 hkv=2 d=64 dtype=bf16 causal deterministic",
        "attention pass=backward sq=2100 sk=300 hq=4 hkv=1 d=64 dtype=bf16 causal deterministic",
        "attention pass=backward sq=700 sk=700 hq=2 d=96 dtype=bf16 window=300:100 sink batch_invariant"}) {
    SCOPED_TRACE(line);
    const cases::Case one = cases::Case::parse(line);
    cases::Inputs inputs(one);
    Wishes wishes;
    wishes.splits = one.wishes.splits;
    PlacedRun run(inputs, make_plan(one.problem, target_, wishes));
    std::vector<std::byte> first;
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      inputs.restore();
      ASSERT_EQ(run.run(), "");
      std::vector<std::byte> bits;
      for (const auto& buffer : inputs.buffers()) {
        if (inputs.is_output(buffer.slot)) bits.insert(bits.end(), buffer.bytes.begin(), buffer.bytes.end());
      }
      if (repetition == 0) {
        first = bits;
        const auto oracle = reference::compute(one.problem, inputs.bindings(), reference::Arithmetic::oracle);
        EXPECT_EQ(judge(one.problem, inputs.bindings(), oracle), "");
      }
      ASSERT_EQ(bits.size(), first.size());
      ASSERT_EQ(std::memcmp(bits.data(), first.data(), bits.size()), 0) << "run " << repetition;
    }
  }
}

class GpuIdentity : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, GpuIdentity, every_gpu(), name_of_place);

// How keys reach shared memory and which rows share a block is none of the result's business.
TEST_P(GpuIdentity, LoadersStagesAndRowsChangeNoBit) {
  for (const char* line : {"attention b=2 sq=200 sk=333 hq=4 hkv=2 d=64 dtype=bf16 causal lse seed=20",
                           "attention b=2 sq=90 sk=333 layout=varlen lens_q=90,33 lens_k=333,80 hq=2 d=128 dtype=fp16 "
                           "window=60:10 lse seed=21"}) {
    SequenceRun first(line);
    const std::string common = of_one_kernel(target_, "tile_kv=64 splits=1 ");
    ASSERT_NO_FATAL_FAILURE(run_on(target_, first, common + "loader=cp_async"));
    int compared = 0;
    for (const char* wish : {"stages=1", "stages=2", "stages=3", "tile_q=64 warps=4", "tile_q=64 warps=2",
                             "tile_q=128 warps=4", "tile_q=32 warps=2", "loader=tma", "loader=tma stages=2",
                             "loader=tma_warp", "loader=tma_warp stages=3", "loader=tma_warp tile_q=128 warps=8"}) {
      SCOPED_TRACE(std::string(line) + ", " + wish);
      const std::string wishes = common + wish;
      if (!supports(first.problem(), target_, Wishes::parse(wishes))) continue;
      SequenceRun other(line);
      ASSERT_NO_FATAL_FAILURE(run_on(target_, other, wishes));
      for (std::int64_t b = 0; b < 2; ++b) expect_same(first, b, other, b);
      ++compared;
    }
    EXPECT_GE(compared, 4);
  }
}

// By boxes of TMA, of as many keys as lie together.
TEST_P(GpuIdentity, PagedIsVarlenIsDenseByWarpgroups) {
  const std::string wishes = "implementation=cuda.fwd_wgmma tile_kv=64";
  int compared = 0;
  for (const char* common : {" hq=4 hkv=2 d=64 dtype=bf16 causal lse seed=3", " hq=4 hkv=4 d=128 dtype=fp16 lse seed=4",
                             " hq=2 hkv=1 d=96 dtype=bf16 window=90:20 softcap=9 sink lse seed=5"}) {
    for (const char* splits : {" splits=1", " splits=3"}) {
      SequenceRun varlen("attention b=3 sq=70 sk=330 layout=varlen lens_q=70,7,43 lens_k=330,11,200" +
                         std::string(common));
      if (!supports(varlen.problem(), target_, Wishes::parse(wishes + splits))) continue;
      ASSERT_NO_FATAL_FAILURE(run_on(target_, varlen, wishes + splits));
      for (const char* keys : {"kv=varlen", "kv=dense seqused_k", "kv=table page=16 pages=shuffled",
                               "kv=table page=1 pages=shuffled", "kv=table page=256", "kv=csr page=7 pages=shuffled",
                               "kv=csr page=64 pages=shuffled", "kv=csr page=12 pages=shuffled"}) {
        SCOPED_TRACE(std::string(keys) + common + splits);
        SequenceRun other(std::string("attention b=3 sq=70 sk=330 lens_q=70,7,43 lens_k=330,11,200 seqused_q ") + keys +
                          common);
        if (!supports(other.problem(), target_, Wishes::parse(wishes + splits))) continue;
        other.copy_inputs(varlen);
        ASSERT_NO_FATAL_FAILURE(run_on(target_, other, wishes + splits));
        for (std::int64_t b = 0; b < 3; ++b) expect_same(varlen, b, other, b);
        ++compared;
      }
    }
  }
  if (target_.sm == 90) {
    EXPECT_GE(compared, 40);
  }
}

struct DropoutCase {
  const char* values;
  std::uint64_t seed, offset;
  std::int64_t query_position, key_position, batch, head;
};
constexpr DropoutCase kDropouts[] = {
    {"drop_seed=7 q_offset=0", 7, 0, 0, 0, 0, 0},
    {"drop_seed=7 q_offset=0 drop_scalars drop_offset=12884901893", 7, 12884901893, 0, 0, 0, 0},
    {"drop_seed=18446744073709551615 drop_offset=18446744073709551615 q_offset=-21 k_offset=5", ~std::uint64_t{0},
     ~std::uint64_t{0}, -21, 5, 0, 0},
    {"drop_seed=99 q_offset=8589934597 k_offset=8589934599 batch_offset=3 head_offset=2", 99, 0, 8589934597, 8589934599,
     3, 2}};

TEST_P(Identity, DropoutsMaskIsTheFormulas) {
  constexpr std::int64_t kKeys = 256;
  constexpr float kDrop = 0.3F;
  for (const char* form :
       {"dtype=bf16", "dtype=fp16 kv=table page=16 lens_k=256 pages=shuffled", "dtype=bf16 splits=3"}) {
    for (const DropoutCase& at : kDropouts) {
      SCOPED_TRACE(std::string(form) + " " + at.values);
      const std::string line =
          std::string("attention b=2 sq=70 sk=256 hq=4 hkv=2 d=32 dv=256 dropout=0.3 ") + at.values + " " + form;
      // Equal scores and values that are unit vectors: o[i][j] is row i's weight of key j.
      SequenceRun run(line);
      std::vector<double> unit(kKeys, 0.0);
      for (std::int64_t j = 0; j < kKeys; ++j) {
        unit.assign(kKeys, 0.0);
        unit[static_cast<std::size_t>(j)] = 1;
        for (std::int64_t b = 0; b < 2; ++b) {
          for (std::int64_t h = 0; h < 2; ++h) {
            run.set_key_row(Slot::k, b, j, h, std::vector<double>(32, 0.0));
            run.set_key_row(Slot::v, b, j, h, unit);
          }
        }
      }
      run.remember();
      const auto splits = cases::Case::parse(line).wishes.splits.value_or(1);
      ASSERT_NO_FATAL_FAILURE(run_on(target_, run, "splits=" + std::to_string(splits)));
      const std::uint32_t threshold = reference::dropout_threshold(kDrop);
      const double weight = 65536.0 / threshold / kKeys;
      std::int64_t wrong = 0;
      for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 4; ++h) {
          const auto batch_head = static_cast<std::uint32_t>((at.batch + b) * 4 + at.head + h);
          for (std::int64_t i = 0; i < 70; ++i) {
            const std::vector<double> row = run.query_row(Slot::o, b, i, h);
            for (std::int64_t j = 0; j < kKeys; ++j) {
              const std::uint32_t draw = reference::dropout_draw(at.seed, at.offset, batch_head,
                                                                 static_cast<std::uint32_t>(at.query_position + i),
                                                                 static_cast<std::uint32_t>(at.key_position + j));
              const double want = draw < threshold ? weight : 0.0;
              const double got = row[static_cast<std::size_t>(j)];
              // A kept key's weight is rounded to 8 bits at worst; a dropped key's is nothing at all.
              wrong += want == 0 ? got != 0 : !(std::fabs(got - want) <= want / 128);
            }
          }
        }
      }
      EXPECT_EQ(wrong, 0) << "of " << 2 * 4 * 70 * kKeys << " draws";
    }
  }
}

}  // namespace
}  // namespace tessera::test
