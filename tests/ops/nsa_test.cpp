// SPDX-License-Identifier: Apache-2.0
// What the judge of case lines cannot see: which of equal scores is taken, what a list depends on, and what is exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cases/inputs/inputs.h"
#include "cases/trial.h"
#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<std::int32_t> list_of(const Tensor& indices, std::int64_t list) {
  const auto* begin = indices.as<std::int32_t>() + list * indices.shape[3];
  return {begin, begin + indices.shape[3]};
}

void fill(const Tensor& tensor, float value) {
  reference::for_each_element(tensor,
                              [&](std::int64_t, std::int64_t offset) { reference::write(tensor, offset, value); });
}

void run(const Case& one, Inputs& inputs, const std::string& isa = "") {
  Executor(make_plan(one.problem, Target::cpu(1, isa))).run(inputs.bindings());
}

// All scores alike: forced blocks, and of the others those in front.
TEST(NsaSelect, TakesTheLowerIndexOfEqualScores) {
  for (const char* score : {"dot", "softmax"}) {
    const Case one = Case::parse(std::string("nsa_select sq=160 d=16 length=16 tile=16 top=6 causal score=") + score);
    for (const std::string& isa : tested_isas()) {
      Inputs inputs(one);
      fill(inputs.bindings()[Slot::k_pooled], 0.5F);
      run(one, inputs, isa);
      const Tensor& indices = inputs.bindings()[Slot::selected_indices];
      EXPECT_EQ(list_of(indices, 9), (std::vector<std::int32_t>{0, 1, 2, 3, 8, 9})) << score << " " << isa;
      EXPECT_EQ(list_of(indices, 4), (std::vector<std::int32_t>{0, 1, 2, 3, 4, -1})) << score << " " << isa;
      EXPECT_EQ(list_of(indices, 0), (std::vector<std::int32_t>{0, -1, -1, -1, -1, -1})) << score << " " << isa;
    }
  }
}

// Small integers, whose sums every order of summation gives exactly, and few of them, so that many scores are alike.
TEST(NsaSelect, IsTheOraclesWhereSumsAreExact) {
  for (const char* line :
       {"nsa_select b=2 sq=300 hq=4 hkv=2 d=16 length=8 tile=8 top=7 causal scale=1",
        "nsa_select b=2 sq=300 hq=4 hkv=2 d=16 length=8 tile=32 top=9 causal scale=1 reduce=max heads=q",
        "nsa_select b=2 sq=300 hq=4 hkv=2 d=16 length=8 tile=256 top=40 causal scale=-1 reduce=mean visible=started"}) {
    const Case one = Case::parse(line);
    Inputs inputs(one);
    RandomNumbers random(7);
    for (const Slot slot : {Slot::q, Slot::k_pooled}) {
      const Tensor& tensor = inputs.bindings()[slot];
      reference::for_each_element(tensor, [&](std::int64_t, std::int64_t offset) {
        reference::write(tensor, offset, static_cast<double>(random.between(-1, 1)));
      });
    }
    const reference::Result oracle = reference::compute(one.problem, inputs.bindings(), reference::Arithmetic::oracle);
    for (const std::string& isa : tested_isas()) {
      run(one, inputs, isa);
      const Tensor& indices = inputs.bindings()[Slot::selected_indices];
      std::vector<double> got;
      reference::for_each_element(
          indices, [&](std::int64_t, std::int64_t offset) { got.push_back(reference::read(indices, offset)); });
      EXPECT_EQ(got, oracle[Slot::selected_indices].values) << line << " " << isa;
    }
  }
}

// Forced blocks that do not exist yet keep their places: a longer sequence gives its first tiles the same lists.
TEST(NsaSelect, ListsDoNotDependOnWhatFollows) {
  const auto lists = [](const char* line) {
    const Case one = Case::parse(line);
    Inputs inputs(one);
    run(one, inputs);
    std::vector<std::vector<std::int32_t>> all;
    for (std::int64_t list = 0; list < 3; ++list) {
      std::vector<std::int32_t> blocks = list_of(inputs.bindings()[Slot::selected_indices], list);
      std::erase_if(blocks, [](std::int32_t block) { return block < 0 || block >= 19; });  // those of 150 tokens
      all.push_back(blocks);
    }
    return all;
  };
  EXPECT_EQ(lists("nsa_select sq=150 d=16 length=8 tile=64 top=12 causal seed=5"),
            lists("nsa_select sq=900 d=16 length=8 tile=64 top=12 causal seed=5"));
}

// Behind the tile's first token anything may be: the list stays. Of the mean, or of blocks seen early, it does not.
TEST(NsaSelect, StrictListsReadNothingBehindTheTilesFirstToken) {
  const auto changed = [](const char* line) {
    const Case one = Case::parse(line);
    Inputs inputs(one);
    run(one, inputs);
    const Tensor& indices = inputs.bindings()[Slot::selected_indices];
    const std::vector<std::int32_t> before = list_of(indices, 5);  // rows 80 … 95
    const Tensor& q = inputs.bindings()[Slot::q];
    const Tensor& k = inputs.bindings()[Slot::k_pooled];
    for (std::int64_t row = 81; row < q.shape[1]; ++row) q.as<float>()[row * 16 + row % 16] = 40;
    for (std::int64_t block = 10; block < k.shape[1]; ++block) {  // tokens from 80 on
      for (std::int64_t c = 0; c < 16; ++c) k.as<float>()[block * 16 + c] = static_cast<float>(block * c % 7) - 3;
    }
    run(one, inputs);
    return before != list_of(indices, 5);
  };
  EXPECT_FALSE(changed("nsa_select sq=160 d=16 length=8 tile=16 top=6 causal seed=1"));
  EXPECT_FALSE(changed("nsa_select sq=160 d=16 length=8 tile=16 top=6 score=softmax causal seed=1"));
  EXPECT_TRUE(changed("nsa_select sq=160 d=16 length=8 tile=16 top=6 reduce=mean causal seed=1"));
  EXPECT_TRUE(changed("nsa_select sq=160 d=16 length=8 tile=16 top=4 initial=0 local=0 visible=started causal seed=1"));
}

// The second list likewise, and a block whose best key is not seen yet is not better for it.
TEST(NsaSelect, ListsOfCompressedKeysReadNothingBehindTheTilesFirstToken) {
  const auto changed = [](const std::string& words) {
    const Case one = Case::parse("nsa_select sq=640 d=16 length=8 tile=16 top=6 causal compressed_block=4 " + words);
    Inputs inputs(one);
    run(one, inputs);
    const Tensor& indices = inputs.bindings()[Slot::compressed_indices];
    const std::vector<std::int32_t> before = list_of(indices, 25);  // rows 400 … 415, of which the first sees 50 keys
    const Tensor& q = inputs.bindings()[Slot::q];
    const Tensor& k = inputs.bindings()[Slot::k_pooled];
    for (std::int64_t row = 401; row < q.shape[1]; ++row) q.as<float>()[row * 16 + row % 16] = 40;
    for (std::int64_t key = 50; key < k.shape[1]; ++key) {
      for (std::int64_t c = 0; c < 16; ++c) k.as<float>()[key * 16 + c] = static_cast<float>(key * c % 7) - 3;
    }
    run(one, inputs);
    return before != list_of(indices, 25);
  };
  for (const int seed : {1, 2, 3}) {
    const std::string words = "compressed_top=4 seed=" + std::to_string(seed);
    EXPECT_FALSE(changed(words)) << seed;
    EXPECT_FALSE(changed(words + " score=softmax")) << seed;
    EXPECT_TRUE(changed(words + " reduce=mean")) << seed;
  }
}

// Keys 4g … 4g + 3 of a block: the best of them decides, of equal ones the lower block; the newest are always there.
TEST(NsaSelect, TheBestKeyOfABlockDecides) {
  const Case one =
      Case::parse("nsa_select sq=320 d=16 length=8 tile=16 top=6 causal compressed_top=4 compressed_block=4 scale=1");
  for (const std::string& isa : tested_isas()) {
    Inputs inputs(one);
    fill(inputs.bindings()[Slot::q], 1.0F);
    const Tensor& k = inputs.bindings()[Slot::k_pooled];
    fill(k, -1.0F);
    for (const std::int64_t key : {2, 11, 12, 22}) k.as<float>()[key * 16] = static_cast<float>(key == 12 ? 9 : 5);
    k.as<float>()[1 * 16 + 1] = kNaN;
    run(one, inputs, isa);
    const Tensor& indices = inputs.bindings()[Slot::compressed_indices];
    const Tensor& counts = inputs.bindings()[Slot::compressed_counts];
    EXPECT_EQ(list_of(indices, 16), (std::vector<std::int32_t>{0, 3, 7, 8}))
        << isa;  // rows 256 … 271 see 32 to 34 keys
    EXPECT_EQ(list_of(indices, 1), (std::vector<std::int32_t>{0, -1, -1, -1})) << isa;
    EXPECT_EQ(counts.as<std::int32_t>()[0], 1) << isa;  // row 15 sees key 1, row 0 none
  }
}

TEST(NsaSelect, ScoresThatAreNoNumbersComeLast) {
  const Case one = Case::parse("nsa_select sq=80 d=16 length=8 top=4 initial=0 local=0");
  Inputs inputs(one);
  fill(inputs.bindings()[Slot::q], 1.0F);
  const Tensor& k = inputs.bindings()[Slot::k_pooled];
  fill(k, -1.0F);
  for (const std::int64_t block : {0, 1, 2, 3, 5, 7, 8}) k.as<float>()[block * 16 + 3] = kNaN;
  run(one, inputs);
  EXPECT_EQ(list_of(inputs.bindings()[Slot::selected_indices], 0), (std::vector<std::int32_t>{0, 4, 6, 9}));
}

TEST(NsaGate, AGateOfZeroLeavesItsBranchOut) {
  const Case one = Case::parse("nsa_gate sq=3 d=16 gate=given");
  Inputs inputs(one);
  fill(inputs.bindings()[Slot::o_parts], 2.0F);
  fill(inputs.bindings()[Slot::gates], 0.5F);
  for (std::int64_t c = 0; c < 16; ++c) inputs.bindings()[Slot::o_parts].as<float>()[c] = kNaN;
  inputs.bindings()[Slot::gates].as<float>()[0] = 0;
  run(one, inputs);
  for (std::int64_t c = 0; c < 48; ++c) EXPECT_EQ(inputs.bindings()[Slot::o].as<float>()[c], c < 16 ? 2.0F : 3.0F);
}

}  // namespace
}  // namespace tessera::cases
