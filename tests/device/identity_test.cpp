// SPDX-License-Identifier: Apache-2.0
// The same attention written in two ways, and the same run many times: bit for bit. Tiles of keys and splits decide in
// which order a row's keys are added, so both are wished for where the forms would choose different ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/place.h"
#include "device/placed_sequences.h"

namespace tessera::test {
namespace {

/// Wishes under which forms are equal: on a GPU of the implementation that every place has.
std::string of_one_kernel(const Target& target, const std::string& wishes) {
  return is_on_gpu(target) ? "implementation=cuda.fwd_mma " + wishes : wishes;
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
