// SPDX-License-Identifier: Apache-2.0
// What the host tells a forward: strides, partial results of splits, sizes of a list. Functions without a driver.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/attention/params.h"
#include "cuda/attention/splits/partials.h"
#include "cuda/attention/tiles/list_params.h"

namespace tessera {
namespace {

constexpr const char* kPacked = "attention b=3 sq=900 layout=varlen tq=1000 hq=4 d=64 dv=32 dtype=bf16 sink lse";
constexpr const char* kDense = "attention b=3 sq=900 hq=4 d=64 dv=32 dtype=bf16 sink lse";

TEST(Partials, OfPackedSequencesHaveTheTokensRows) {
  const cuda::Partials packed(Problem::parse(kPacked), 2), dense(Problem::parse(kDense), 2);
  EXPECT_EQ(packed.o_part, 1000 * 4 * 32);
  EXPECT_EQ(packed.lse_part, 1000 * 4);
  EXPECT_EQ(dense.o_part, 3 * 900 * 4 * 32);
  EXPECT_EQ(dense.lse_part, 3 * 900 * 4);
  EXPECT_EQ(cuda::partials_bytes(Problem::parse(kPacked), 2), 2U * (1000 * 4 * 32 + 1000 * 4) * 4);
  EXPECT_EQ(cuda::partials_bytes(Problem::parse(kPacked), 1), 0U);
}

TEST(Partials, KnowNoSink) {
  float sinks = 0, lse = 0;
  std::byte o{};
  cuda::FwdParams forward{};
  forward.o = &o;
  forward.lse = &lse;
  forward.sinks = &sinks;
  forward.sinks_stride = 7;
  std::vector<std::byte> workspace(64);
  const Problem problem = Problem::parse(kPacked);
  const cuda::Partials partials(problem, 3);
  const cuda::CombineParams merge = cuda::redirect_to(partials, workspace.data(), problem, forward);
  EXPECT_EQ(forward.sinks, nullptr) << "it enters once, where the parts are merged";
  EXPECT_EQ(merge.sinks, &sinks);
  EXPECT_EQ(merge.sinks_stride, 7);
  EXPECT_EQ(merge.o, &o);
  EXPECT_EQ(merge.lse, &lse);
  EXPECT_EQ(forward.o, workspace.data());
  EXPECT_EQ(forward.o_split, partials.o_part);
  EXPECT_EQ(merge.parts, 3);
}

TEST(FwdParams, Strides) {
  std::array<float, 1> memory{};
  const auto same = [](const cuda::Strides& got, const std::array<std::int64_t, 3>& want) {
    return got.batch == want[0] && got.row == want[1] && got.head == want[2];
  };
  const Tensor packed = Tensor::strided(memory.data(), DType::fp32, {4, 1000}, {1010, 1});
  const Tensor dense = Tensor::strided(memory.data(), DType::fp32, {3, 4, 900}, {5000, 1010, 1});
  EXPECT_TRUE(same(cuda::lse_strides(packed), {0, 1, 1010})) << "(heads, tokens)";
  EXPECT_TRUE(same(cuda::lse_strides(dense), {5000, 1, 1010})) << "(batch, heads, rows)";
}

TEST(FwdParams, SlopesOfHeadsAndOfBatches) {
  std::array<float, 12> memory{};
  const Problem problem = Problem::parse("attention b=3 sq=8 hq=4 d=64 dtype=bf16 alibi");
  Bindings bindings;
  bindings[Slot::alibi_slopes] = Tensor::strided(memory.data(), DType::fp32, {4}, {1});
  const cuda::FwdParams heads = cuda::fwd_params(problem, bindings, 1);
  EXPECT_EQ(heads.slopes_batch, 0);
  EXPECT_EQ(heads.slopes_head, 1);
  bindings[Slot::alibi_slopes] = Tensor::strided(memory.data(), DType::fp32, {3, 4}, {5, 1});
  const cuda::FwdParams batches = cuda::fwd_params(problem, bindings, 1);
  EXPECT_EQ(batches.slopes_batch, 5);
  EXPECT_EQ(batches.slopes_head, 1);
}

TEST(ListParams, BlocksOfEachSource) {
  const Problem problem =
      Problem::parse("attention sq=100 sk=6401 kv2=dense sk2=65 d=64 dtype=bf16 list=bitmask block=64x64");
  Bindings bindings;
  bindings[Slot::tile_bits] = Tensor::strided(nullptr, DType::int32, {1, 1, 2, 4}, {8, 8, 4, 1});
  const cuda::ListParams list = cuda::list_params(problem, bindings);
  EXPECT_EQ(list.key_blocks, 103);
  EXPECT_EQ(list.second_block, 101);
  EXPECT_EQ(list.second_blocks, 2);
  EXPECT_EQ(list.words, 4);
}

// As ptx::divide does it.
TEST(Divisor, IsExactBelow2To31) {
  const auto divide = [](std::uint32_t x, const cuda::Divisor& by) {
    return by.value == 1 ? x : static_cast<std::uint32_t>(std::uint64_t{x} * by.multiplier >> 32U) >> by.shift;
  };
  constexpr std::uint32_t kMost = 0x7FFFFFFF;
  for (std::uint32_t divisor = 1; divisor < 3000; ++divisor) {
    const cuda::Divisor by(static_cast<int>(divisor));
    for (const std::uint32_t quotient : {0U, 1U, 2U, 1000U, kMost / divisor}) {
      if (quotient > kMost / divisor) continue;
      const std::uint32_t multiple = quotient * divisor;
      EXPECT_EQ(divide(multiple, by), quotient) << divisor;
      if (multiple == 0) continue;
      EXPECT_EQ(divide(multiple - 1, by), quotient - 1) << divisor;
    }
    EXPECT_EQ(divide(kMost, by), kMost / divisor);
  }
}

}  // namespace
}  // namespace tessera
