// SPDX-License-Identifier: Apache-2.0
// The host side of the forwards on a GPU: what runs refuse, their grids and their parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "core/expect_error.h"
#include "cuda/attention/params.h"
#include "cuda/driver/occupancy.h"
#include "launch/launch.h"
#include "plan/implementations.h"

namespace tessera {
namespace {

using cuda::u64;

TEST_F(Launch, BlocksShareWideOutputs) {
  const Problem wide = Problem::parse("attention b=3 sq=300 hq=4 hkv=2 d=128 dv=512 dtype=bf16 causal");
  const Plan plan = make_plan(wide, Target::cuda_device(0));
  Executor(plan).run(dense(wide));
  const std::int64_t tiles = (wide.seqlen_q * wide.group() + plan.state().tile_q - 1) / plan.state().tile_q;
  EXPECT_EQ(gpu_.last.grid[0], 2 * tiles * wide.heads_kv * wide.batch);
}

TEST_F(Launch, TmaWantsPositiveStrides) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  for (const Slot slot : {Slot::k, Slot::v}) {
    Bindings bindings = dense(problem_);
    bindings[slot].strides[1] = 0;  // every key the same
    expect_error([&] { executor.run(bindings); }, ErrorCode::unsupported, to_string(slot));
    Executor(make_plan(problem_, Target::cuda_device(0), Wishes::parse("loader=cp_async"))).run(bindings);
    bindings = dense(problem_);
    bindings[slot].strides[2] = 0;  // one head for all
    executor.run(bindings);
  }
}

TEST_F(Launch, StridesOfOneElementMeanNothing) {
  for (const char* line :
       {"attention b=3 sq=1 sk=300 hq=4 d=64 dtype=bf16 lse",
        "attention b=3 sq=300 sk=1 hq=4 hkv=1 d=64 dtype=bf16 lse", "attention sq=1 hq=1 sk=1 d=64 dtype=bf16 lse"}) {
    const Problem problem = Problem::parse(line);
    const auto params = [&](std::int64_t stride, const char* wishes) {
      Bindings bindings = dense(problem);
      for (Tensor& tensor : bindings.tensors) {
        for (std::size_t i = 0; tensor && i + 1 < static_cast<std::size_t>(tensor.rank); ++i) {
          if (tensor.shape[i] == 1) tensor.strides[i] = stride;
        }
      }
      Executor(make_plan(problem, Target::cuda_device(0), Wishes::parse(wishes))).run(bindings);
      cuda::FwdParams p{};
      std::memcpy(static_cast<void*>(&p), gpu_.last.parameters.data(), sizeof(p));
      const auto& [k, v] = std::pair{p.kv[0].k_strides, p.kv[0].v_strides};
      return std::vector{
          p.q_strides.batch, p.q_strides.row, p.q_strides.head, p.o_strides.batch, p.o_strides.row, p.o_strides.head,
          k.batch,           k.row,           k.head,           v.batch,           v.row,           v.head,
          p.lse_strides.row};
    };
    for (const char* wishes : {"splits=1", "splits=1 loader=cp_async implementation=cuda.fwd_mma"}) {
      const auto want = params(0, wishes);
      for (const std::int64_t stride : {std::int64_t{1} << 30, -(std::int64_t{1} << 40) - 3}) {
        EXPECT_EQ(params(stride, wishes), want) << line << ", " << wishes;
      }
    }
  }
}

TEST_F(Launch, BytesBetweenRowsFit32Bits) {
  const Problem problem = Problem::parse("attention sq=2 sk=2 d=64 dtype=bf16");
  Executor executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("loader=cp_async")));
  constexpr std::int64_t kMost = std::int64_t{1} << 29;
  const auto run = [&](Slot slot, std::int64_t stride) {
    Bindings bindings = dense(problem);
    bindings[slot].data = reinterpret_cast<void*>(std::uintptr_t{1} << 50);  // far from the others
    bindings[slot].strides[1] = stride;
    executor.run(bindings);
  };
  for (const Slot slot : {Slot::q, Slot::k, Slot::v, Slot::o}) {
    for (const std::int64_t sign : {1, -1}) {
      expect_error([&] { run(slot, sign * kMost); }, ErrorCode::unsupported, to_string(slot));
      run(slot, sign * (kMost - 8));
    }
  }
}

// Else threads copy its rows.
TEST_F(Launch, TmaTakesQueriesWhere64PackedRowsAreABox) {
  const auto maps = [&](const char* line, const std::function<void(Tensor&)>& change) {
    const Problem problem = Problem::parse(line);
    Executor executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("implementation=cuda.fwd_wgmma")));
    Bindings bindings = dense(problem);
    change(bindings[Slot::q]);
    gpu_.map_count = 0;
    executor.run(bindings);
    return gpu_.map_count;
  };
  constexpr std::size_t kBesides = 2;  // of keys and values
  const char* pairs = "attention b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16";
  const char* single = "attention b=2 sq=300 hq=4 d=64 dtype=bf16";
  const char* threes = "attention b=2 sq=300 hq=6 hkv=2 d=64 dtype=bf16";
  EXPECT_EQ(maps(pairs, [](Tensor&) {}), kBesides + 1);
  using Sizes = decltype(FakeMap::sizes);
  using Box = decltype(FakeMap::box);
  EXPECT_EQ(gpu_.maps.front().sizes, (Sizes{64, 4, 300, 2}));  // column, head, row, sequence
  EXPECT_EQ(gpu_.maps.front().box, (Box{64, 2, 32, 1}));
  EXPECT_EQ(maps(pairs, [](Tensor& q) { q.strides[0] = 0; }), kBesides + 1);
  EXPECT_EQ(maps(single, [](Tensor& q) { q.strides[2] = 0; }), kBesides + 1);
  EXPECT_EQ(gpu_.maps.front().sizes, (Sizes{64, 1, 300, 2}));
  EXPECT_EQ(gpu_.maps.front().box, (Box{64, 1, 64, 1}));
  EXPECT_EQ(maps(pairs, [](Tensor& q) { q.strides[2] = 0; }), kBesides);
  EXPECT_EQ(maps(pairs, [](Tensor& q) { q.strides[1] = 0; }), kBesides);
  EXPECT_EQ(maps(pairs, [](Tensor& q) { q.strides[0] = std::int64_t{1} << 39; }), kBesides);  // elements
  EXPECT_EQ(maps(threes, [](Tensor&) {}), kBesides);
}

// Of a tensor of (column, row of eight, panel, eight rows, head and page), so that a box is a page's rows of all
// columns.
TEST_F(Launch, TmaTakesAllColumnsOfSmallPages) {
  const auto bind = [this](const Problem& problem, std::int64_t pages, std::int64_t page_size) {
    Bindings bindings;
    for (const Slot slot : {Slot::q, Slot::o}) bindings[slot] = tensor(DType::bf16, {2, 300, 4, 128});
    for (const Slot slot : {Slot::k, Slot::v}) bindings[slot] = tensor(DType::bf16, {pages, page_size, 2, 128});
    bindings[Slot::page_table] = tensor(DType::int32, {2, (problem.kv.seqlen + page_size - 1) / page_size});
    bindings[Slot::seqused_k] = tensor(DType::int32, {2});
    return bindings;
  };
  const auto plan = [](const Problem& problem) {
    return make_plan(problem, Target::cuda_device(0), Wishes::parse("implementation=cuda.fwd_wgmma"));
  };
  const std::string line = "attention b=2 sq=300 hq=4 hkv=2 d=128 dtype=bf16 kv=table pages=50";
  using Sizes = decltype(FakeMap::sizes);
  using Box = decltype(FakeMap::box);
  const Problem small = Problem::parse(line + " page=16");
  Executor executor(plan(small));
  gpu_.map_count = 0;
  executor.run(bind(small, 50, 16));
  ASSERT_EQ(gpu_.map_count, 3U);
  EXPECT_EQ(gpu_.maps[1].sizes,
            (Sizes{64, 8, 2, 2, 16 * 2 * 49 + 2}));  // heads lie 128 elements apart, pages 32 times that
  EXPECT_EQ(gpu_.maps[1].box, (Box{64, 8, 2, 2, 1}));
  Bindings heads_first = bind(small, 50, 16);
  heads_first[Slot::v].strides = {16 * 2 * 128, 128, 16 * 128, 1};
  gpu_.map_count = 0;
  executor.run(heads_first);
  EXPECT_EQ(gpu_.maps[2].sizes, (Sizes{64, 8, 2, 2, 2 * 49 + 2}));
  Bindings one_head = bind(small, 50, 16);
  one_head[Slot::k].strides[2] = 0;
  gpu_.map_count = 0;
  executor.run(one_head);
  EXPECT_EQ(gpu_.maps[1].sizes, (Sizes{64, 8, 2, 2, 50}));
  Bindings far = bind(small, 50, 16);
  far[Slot::v].strides[0] = (std::int64_t{1} << 32) + 8;
  expect_error([&] { executor.run(far); }, ErrorCode::unsupported, "v");
  const Problem large = Problem::parse(line + " page=64");
  gpu_.map_count = 0;
  Executor(plan(large)).run(bind(large, 50, 64));
  EXPECT_EQ(gpu_.maps[1].sizes, (Sizes{128, 2, 64, 50}));
  EXPECT_EQ(gpu_.maps[1].box, (Box{64, 1, 64, 1}));
}

TEST_F(Launch, EmptySourcesNeedNoMemory) {
  const Problem problem = Problem::parse("attention sq=100 sk=50 d=64 hq=2 dtype=bf16 kv2=dense sk2=0");
  Bindings bindings = dense(problem);
  for (const Slot slot : {Slot::k2, Slot::v2}) {
    bindings[slot] = tensor(DType::bf16, {1, 0, 2, 64});
    bindings[slot].data = nullptr;
  }
  Executor(make_plan(problem, Target::cuda_device(0))).run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
}

TEST_F(Launch, NoTokensNeedNoMemory) {
  const Problem problem = Problem::parse("attention b=2 sq=100 sk=50 d=64 hq=2 dtype=bf16 layout=varlen tq=0");
  Bindings bindings;
  for (const Slot slot : {Slot::q, Slot::o}) {
    bindings[slot] = tensor(DType::bf16, {0, 2, 64});
    bindings[slot].data = nullptr;
  }
  for (const Slot slot : {Slot::k, Slot::v}) bindings[slot] = tensor(DType::bf16, {problem.kv.total, 2, 64});
  for (const Slot slot : {Slot::cu_seqlens_q, Slot::cu_seqlens_k}) bindings[slot] = tensor(DType::int32, {3});
  Executor(make_plan(problem, Target::cuda_device(0))).run(bindings);
  EXPECT_EQ(gpu_.launches, 0);
}

TEST_F(Launch, AWarpgroupBesideThoseThatComputeCopies) {
  const Plan plan = make_plan(problem_, Target::cuda_device(0));
  EXPECT_EQ(plan.implementation(), "cuda.fwd_wgmma");
  EXPECT_NE(plan.state().kernels.front().text.find("forward/wgmma.cuh"), std::string::npos);
  Executor(plan).run(dense(problem_));
  const std::int64_t tile_q = plan.state().tile_q;
  EXPECT_EQ(gpu_.last.block[0], tile_q / 64 * 128 + 128);
  EXPECT_EQ(gpu_.last.attributes, 1U);  // it may begin before the kernel in front has ended
  EXPECT_EQ(gpu_.last.grid[0],
            (problem_.seqlen_q * problem_.group() + tile_q - 1) / tile_q * problem_.heads_kv * problem_.batch);
}

TEST_F(Launch, AWarpBesideThoseThatMultiplyCopies) {
  const auto launch = [&](const char* wishes) {
    const Plan plan = make_plan(problem_, Target::cuda_device(0),
                                Wishes::parse(std::string("implementation=cuda.fwd_mma tile_q=128 ") + wishes));
    gpu_.map_count = 0;
    Executor(plan).run(dense(problem_));
    return gpu_.last.block[0];
  };
  EXPECT_EQ(launch("loader=cp_async"), 128U);
  EXPECT_EQ(gpu_.map_count, 0U);
  EXPECT_EQ(launch("loader=tma"), 128U);
  EXPECT_EQ(gpu_.map_count, 2U);  // of keys and of values
  EXPECT_EQ(launch("loader=tma_warp"), 256U);
  EXPECT_EQ(gpu_.map_count, 2U);
  EXPECT_EQ(launch("loader=tma_warp warps=8"), 384U);
}

// On a multiprocessor of the chip that is there as many blocks run as on one of the emulated chip.
TEST_F(Launch, EmulatedBlocksHaveNoMoreRoomThanTheirs) {
  for (const char* line : {"attention sq=4096 hq=2 d=64 dtype=bf16", "attention sq=4096 hq=2 d=128 dtype=bf16 causal",
                           "attention sq=4096 hq=2 d=256 dtype=bf16", "attention sq=64 hq=2 d=32 dtype=bf16"}) {
    for (const int sm : {80, 89, 120}) {
      const Problem problem = Problem::parse(line);
      const Plan plan = make_plan(problem, Target::emulate(sm, 0));
      Executor(plan).run(dense(problem));
      const auto needed = static_cast<int>(plan.state().kernels.front().shared_bytes);
      EXPECT_GE(static_cast<int>(gpu_.last.shared_bytes), needed) << line;
      EXPECT_EQ(cuda::blocks_that_fit(static_cast<int>(gpu_.last.shared_bytes), Target::cuda(90)),
                cuda::blocks_that_fit(needed, Target::cuda(sm)))
          << line << " on sm_" << sm;
    }
  }
}

// Before the kernels in front have ended, so of nothing that they may still write.
TEST_F(Launch, RowTilesAreFoundEarlyWhereNoMemorySaysWhatTheyAre) {
  const auto early = [&](const std::string& words, std::initializer_list<std::pair<Slot, Tensor>> bound) {
    const Problem problem = Problem::parse("attention b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16 " + words);
    Bindings bindings = dense(problem);
    for (const auto& [slot, tensor] : bound) bindings[slot] = tensor;
    return cuda::fwd_params(problem, bindings, 1).finds_early;
  };
  EXPECT_TRUE(early("causal", {}));
  EXPECT_TRUE(early("window=9:0 compressed_causal=2:1 sink", {{Slot::sink, tensor(DType::fp32, {4})}}))
      << "rows read it, not row tiles";
  EXPECT_TRUE(early("dropout=0.1", {})) << "a seed in the bindings";
  EXPECT_TRUE(early("kv=table page=16", {{Slot::page_table, tensor(DType::int32, {2, 20})}})) << "whole pages";
  const Tensor lengths = tensor(DType::int32, {3});
  const Tensor positions = tensor(DType::int64, {2});
  for (const Slot slot : {Slot::cu_seqlens_q, Slot::seqused_q, Slot::cu_seqlens_k, Slot::seqused_k}) {
    EXPECT_FALSE(early("causal", {{slot, lengths}})) << to_string(slot);
  }
  for (const Slot slot : {Slot::q_offset, Slot::k_offset}) {
    EXPECT_FALSE(early("causal", {{slot, positions}})) << to_string(slot);
  }
  for (const Slot slot : {Slot::cu_seqlens_k2, Slot::seqused_k2}) {
    EXPECT_FALSE(early("kv2=dense sk2=30", {{slot, lengths}})) << to_string(slot);
  }
  EXPECT_FALSE(early("kv2=dense sk2=30", {{Slot::k_offset2, positions}}));
  EXPECT_FALSE(early("kv=csr page=16", {{Slot::page_indptr, lengths}, {Slot::page_indices, lengths}}));
  for (const Slot slot : {Slot::dropout_seed, Slot::dropout_offset}) {
    EXPECT_FALSE(early("dropout=0.1", {{slot, positions}})) << to_string(slot);
  }
  EXPECT_FALSE(early("list=indices block=64x64", {}));
}

// The blocks of one launch, in order: (head_batch, row tile), as Block::of decodes them.
std::vector<std::pair<int, int>> row_tiles_of(const cuda::TileSchedule& order, int blocks) {
  std::vector<std::pair<int, int>> all;
  const auto tiles = static_cast<int>(order.l2_group.value);
  const auto head_batches = static_cast<int>(order.head_batches.value);
  for (int index = 0; index < blocks; ++index) {
    const int from_last = index % tiles / head_batches;
    all.emplace_back(index / tiles * head_batches + index % tiles % head_batches, order.tiles - 1 - from_last);
  }
  return all;
}

TEST_F(Launch, UnderACausalMaskTheLastRowsOfEveryHeadComeFirst) {
  const auto order_of = [&](const char* line) {
    const Problem problem = Problem::parse(line);
    Executor(make_plan(problem, Target::cuda_device(0), Wishes::parse("implementation=cuda.fwd_mma")))
        .run(dense(problem));
    cuda::FwdParams params{};
    std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
    auto all = row_tiles_of(params.schedule, static_cast<int>(gpu_.last.grid[0]));
    EXPECT_EQ(params.schedule.heads.value, 6U);
    const auto head_batches = static_cast<std::size_t>(6 * problem.batch);
    EXPECT_EQ(all.size(), head_batches * static_cast<std::size_t>(params.schedule.tiles));
    EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size()) << "each row tile once";
    EXPECT_LT(std::max_element(all.begin(), all.end())->first, static_cast<int>(head_batches));
    return all;
  };
  const auto last_of = [](const std::vector<std::pair<int, int>>& all) {
    std::size_t same = 0;
    while (same < all.size() && all[same].second == all.front().second) ++same;
    return same;
  };
  EXPECT_EQ(last_of(order_of("attention b=5 sq=1000 hq=6 d=64 dtype=bf16 causal")), 30U);  // of all head_batches
  // 4 MB a head_batch, 16 MB a section of at most 4 head_batches, of which there are to be whole ones.
  EXPECT_EQ(last_of(order_of("attention b=1 sq=16384 hq=6 d=64 dtype=bf16 causal")), 3U);
  EXPECT_EQ(last_of(order_of("attention b=5 sq=1000 hq=6 d=64 dtype=bf16")), 1U);
}

// Infinity times an output or score of 0 would be NaN.
TEST_F(Launch, FactorsAreFiniteForEveryDropoutAndCap) {
  const auto params = [&](const std::string& words) {
    const Problem problem = Problem::parse("attention sq=30 hq=2 d=64 dtype=bf16 " + words);
    return cuda::fwd_params(problem, dense(problem), 1);
  };
  EXPECT_EQ(params("dropout=0.999999").dropout.threshold, 0U) << "keeps nothing";
  EXPECT_EQ(params("dropout=0.999999").dropout.scale, 0.0F);
  EXPECT_EQ(params("dropout=0.75").dropout.scale, 4.0F);
  for (const char* cap : {"1e-45", "3e-39", "1e-30", "0.5", "50", "1e30", "3.4028234e38"}) {
    const cuda::SoftcapParams softcap = params(std::string("softcap=") + cap).softcap;
    EXPECT_TRUE(std::isfinite(softcap.factor)) << cap;
    EXPECT_TRUE(std::isfinite(softcap.saturated)) << cap;
    EXPECT_GT(softcap.factor, 0.0F) << cap;
    EXPECT_GT(softcap.saturated, 0.0F) << cap;
  }
}

// Of tables and pages whose sizes 32 bits do not hold, as much as numbers of 32 bits reach.
TEST_F(Launch, HugeTablesAndPagesAreCutToWhatIsReachable) {
  constexpr int most = std::numeric_limits<int>::max();
  const std::int64_t huge = (std::int64_t{1} << 32) + 5;
  const auto params = [&](const std::string& layout, Slot slot, std::initializer_list<std::int64_t> shape) {
    const Problem problem = Problem::parse("attention b=2 sq=30 sk=90 hq=2 d=64 dtype=bf16 " + layout);
    Bindings bindings = dense(problem);
    for (const Slot one : {Slot::page_table, Slot::page_indptr, Slot::page_indices, Slot::last_page_len}) {
      bindings[one] = tensor(DType::int32, {2, 6});
    }
    bindings[slot] = Tensor::contiguous(bindings[slot].data, DType::int32, shape, {DeviceType::cuda, 0});
    return cuda::kv_params(problem.kv, bindings, 0);
  };
  EXPECT_EQ(params("kv=csr page=16 pages=20", Slot::page_indices, {huge}).page_indices, most);
  EXPECT_EQ(params("kv=csr page=16 pages=20", Slot::page_indices, {12}).page_indices, 12);
  EXPECT_EQ(params("kv=table page=16 pages=20", Slot::page_table, {2, huge}).page_indices, most);
  EXPECT_EQ(params("kv=table page=4294967296 pages=2", Slot::page_table, {2, 1}).page_size.value, most / 2U);
}

// Blocks that stay draw from one, and the last to leave clears both.
TEST_F(Launch, BlocksThatStayHaveTwoCountersInTheWorkspace) {
  const auto run = [&](const char* line, cuda::FwdParams& params) {
    const Problem problem = Problem::parse(line);
    const Plan plan = make_plan(problem, Target::cuda_device(0), Wishes::parse("splits=1"));
    EXPECT_EQ(plan.implementation(), "cuda.fwd_wgmma");
    alignas(64) std::array<u64, 8> workspace{};
    EXPECT_LE(plan.workspace_bytes(), sizeof(workspace));
    Executor(plan, workspace.data(), plan.workspace_bytes()).run(dense(problem));
    std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
    const std::int64_t at = params.tile_counter.drawn == nullptr ? -1 : params.tile_counter.drawn - workspace.data();
    return std::pair{plan.workspace_bytes(), at};
  };
  cuda::FwdParams params{};
  EXPECT_EQ(run("attention sq=100 hq=2 d=64 dtype=bf16", params), std::pair(std::size_t{0}, std::int64_t{-1}));
  EXPECT_EQ(params.tile_counter.left, nullptr);
  const char* many = "attention b=30 sq=4096 hq=40 d=64 dtype=bf16";
  EXPECT_EQ(run(many, params), std::pair(2 * sizeof(u64), std::int64_t{0}));
  EXPECT_EQ(params.tile_counter.left, params.tile_counter.drawn + 1);
  const u64 tag = params.tile_counter.tag;
  EXPECT_NE(tag, 0U);
  EXPECT_LT(gpu_.last.grid[0], static_cast<std::uint32_t>(params.schedule.count));
  run(many, params);
  EXPECT_NE(params.tile_counter.tag, tag) << "another plan's";
}

TEST_F(Launch, MassesAreRelativeToTheForwardsSums) {
  const auto run = [&](const char* words, const char* wishes, cuda::FwdParams& params) {
    const Problem p = Problem::parse(std::string("attention b=2 sq=30 sk=9000 hq=4 d=64 dtype=bf16 mass=mean") + words);
    const Plan plan = make_plan(p, Target::cuda_device(0), Wishes::parse(wishes));
    Bindings bindings = dense(p);
    bindings[Slot::tile_mass] = tensor(DType::fp32, {2, 4, 1, 141});
    if (p.mass_prior_lse) bindings[Slot::prior_lse] = tensor(DType::fp32, {2, 4, 30});
    gpu_.parameter_bytes = plan.state().splits > 1 ? 0 : sizeof(cuda::FwdParams);  // merging has parameters of its own
    Executor(plan).run(bindings);
    std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
    return std::pair{plan.state().splits, plan.workspace_bytes()};
  };
  // Of the workspace: 8 bytes a row, if they are kept, and 4 a row tile (one here) and key block.
  const std::size_t sums = 2 * 4 * 141 * 4;
  cuda::FwdParams params{};
  EXPECT_EQ(run("", "", params), std::pair(std::int64_t{1}, 2 * 4 * 30 * 8 + sums)) << "of 9000 keys";
  EXPECT_NE(params.row_sums, nullptr);
  EXPECT_EQ(params.lse, nullptr) << "nobody wants it";
  EXPECT_EQ(params.row_sum_strides.batch, 4 * 30);
  EXPECT_EQ(params.row_sum_strides.row, 1);
  EXPECT_EQ(params.row_sum_strides.head, 30);
  EXPECT_EQ(run(" mass_lse=prior", "splits=1", params), std::pair(std::int64_t{1}, sums));
  EXPECT_EQ(params.row_sums, nullptr);
  EXPECT_NE(params.lse, nullptr);
  cuda::FwdParams unread{};
  EXPECT_GT(run(" mass_lse=prior", "", unread).first, 1) << "a given LSE needs no sums";
  EXPECT_EQ(run("", "splits=3", unread).first, 3);
}

}  // namespace
}  // namespace tessera
