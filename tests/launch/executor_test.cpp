// SPDX-License-Identifier: Apache-2.0
// An executor on a GPU, as far as its host side goes: stand-ins take the places of the driver and of NVRTC.
#include "tessera/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "core/expect_error.h"
#include "core/implementations.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/device.h"
#include "cuda/jit/kernel.h"
#include "fakes/fakes.h"
#include "fakes/folder.h"
#include "malloc/allocations.h"
#include "shared/params.h"
#include "tessera/callable.h"
#include "tessera/cuda.h"

namespace tessera {
namespace {

/// Tensors in "device memory", which the stand-in takes from the host's.
class Launch : public ::testing::Test {
 protected:
  void SetUp() override {
    cuda::set_nvrtc(testing::fake_nvrtc_path());
    cuda::set_cache_folder(folder_.path());
    cuda::forget_compiled();
    gpu_.context_id += 1;  // as if the context were new: nothing is loaded into it
    gpu_.launch_result = gpu_.module_result = gpu_.capture = 0;
    gpu_.parameter_bytes = sizeof(cuda::FwdParams);
    gpu_.launches = gpu_.modules = 0;
  }
  void TearDown() override {
    cuda::set_nvrtc("");
    cuda::set_cache_folder("");
    for (void* memory : memory_) cuda::release(0, memory);
    gpu_.capture = 0;
  }

  Tensor tensor(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor tensor = Tensor::contiguous(nullptr, dtype, shape, {DeviceType::cuda, 0});
    tensor.data = cuda::allocate(0, static_cast<std::size_t>(tensor.numel()) * size_of(dtype));
    memory_.push_back(tensor.data);
    return tensor;
  }

  Bindings dense(const Problem& p) {
    Bindings bindings;
    bindings[Slot::q] = tensor(p.q_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_qk});
    bindings[Slot::k] = tensor(p.k_type, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_qk});
    bindings[Slot::v] = tensor(p.v_type, {p.batch, p.kv.seqlen, p.heads_kv, p.head_dim_v});
    bindings[Slot::o] = tensor(p.o_type, {p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    if (p.lse) bindings[Slot::lse] = tensor(DType::fp32, {p.batch, p.heads_q, p.seqlen_q});
    return bindings;
  }

  static inline FakeCuda& gpu_ = testing::use_fake_cuda();
  testing::Folder folder_;
  std::vector<void*> memory_;
  Problem problem_ = Problem::parse("attention b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16 causal");
};

TEST_F(Launch, TheStandInIsTheDriver) {
  ASSERT_EQ(cuda::devices().size(), 1U);
  EXPECT_EQ(cuda::devices()[0].name, "Fake GPU");
  EXPECT_EQ(Target::cuda_device(0).sm, 90);
  EXPECT_EQ(Target::cuda_device(0).multiprocessors, 132);
}

TEST_F(Launch, OneRunIsOneLaunchOfThePlansKernel) {
  const Plan plan = make_plan(problem_, Target::cuda_device(0));
  Executor executor(plan);
  const Bindings bindings = dense(problem_);
  int stream = 0;
  executor.run(bindings, {&stream});
  EXPECT_EQ(gpu_.launches, 1);
  EXPECT_EQ(gpu_.modules, 1);
  EXPECT_EQ(gpu_.last.stream, &stream);
  EXPECT_EQ(gpu_.last.shared_bytes, plan.state().kernels.front().shared_bytes);
  const std::int64_t rows = problem_.seqlen_q * problem_.group();
  const std::int64_t tiles = (rows + plan.state().tile_q - 1) / plan.state().tile_q;
  EXPECT_EQ(gpu_.last.grid[0], tiles * problem_.heads_kv * problem_.batch);
  EXPECT_EQ(gpu_.last.grid[1], 1);
  EXPECT_EQ(gpu_.last.grid[2], 1);
  cuda::FwdParams params{};
  std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
  EXPECT_EQ(params.q, bindings[Slot::q].bytes());
  EXPECT_EQ(params.o, bindings[Slot::o].bytes());
  EXPECT_EQ(params.kv[0].v, bindings[Slot::v].bytes());
  EXPECT_EQ(params.lse, nullptr);
  EXPECT_EQ(params.q_strides.row, problem_.heads_q * problem_.head_dim_qk);
}

TEST_F(Launch, BlocksShareWideOutputs) {
  const Problem wide = Problem::parse("attention b=3 sq=300 hq=4 hkv=2 d=128 dv=512 dtype=bf16 causal");
  const Plan plan = make_plan(wide, Target::cuda_device(0));
  Executor(plan).run(dense(wide));
  const std::int64_t tiles = (wide.seqlen_q * wide.group() + plan.state().tile_q - 1) / plan.state().tile_q;
  EXPECT_EQ(gpu_.last.grid[0], 2 * tiles * wide.heads_kv * wide.batch);
}

TEST_F(Launch, BatchInvariantPlansTakeTheSameKernelForEveryBatch) {
  for (const char* rest : {" sq=300 hq=16 d=128 dtype=bf16 causal", " sq=128 hq=16 hkv=8 d=64 dtype=bf16 causal",
                           " sq=2048 hq=2 d=256 dtype=bf16", " sq=300 hq=16 d=128 dtype=bf16 causal affine=2:2",
                           " sq=90 sk=3000 hq=4 d=128 dtype=bf16 kv=table page=16"}) {
    const auto kernels = [&](int batch) {
      const std::string line = "attention b=" + std::to_string(batch) + rest + " batch_invariant";
      const Plan plan = make_plan(Problem::parse(line), Target::cuda_device(0));
      EXPECT_EQ(plan.state().kernels.size(), 1U) << line;
      return plan.state().kernels.front().text;
    };
    for (const int batch : {2, 16, 300}) EXPECT_EQ(kernels(1), kernels(batch)) << rest << ", b=" << batch;
  }
}

TEST_F(Launch, TheCopyEngineWantsPositiveStrides) {
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

TEST_F(Launch, AWarpgroupBesideThoseThatComputeCopies) {
  const Plan plan = make_plan(problem_, Target::cuda_device(0), Wishes::parse("implementation=cuda.fwd_wgmma"));
  EXPECT_EQ(plan.implementation(), "cuda.fwd_wgmma");
  EXPECT_NE(plan.state().kernels.front().text.find("fwd_wgmma.cuh"), std::string::npos);
  Executor(plan).run(dense(problem_));
  const std::int64_t tile_q = plan.state().tile_q;
  EXPECT_EQ(gpu_.last.block[0], tile_q / 64 * 128 + 128);
  EXPECT_EQ(gpu_.last.grid[0],
            (problem_.seqlen_q * problem_.group() + tile_q - 1) / tile_q * problem_.heads_kv * problem_.batch);
}

TEST(Wgmma, WantsWhatItCanDo) {
  const Wishes wish = Wishes::parse("implementation=cuda.fwd_wgmma");
  const auto plan_of = [&](const char* line, int sm) {
    return make_plan(Problem::parse(line), Target::cuda(sm), wish);
  };
  EXPECT_NO_THROW(plan_of("attention sq=100 d=64 dtype=fp16", 90));
  for (const char* line :
       {"attention sq=100 d=64 dtype=bf16 kv=table page=16", "attention sq=100 d=512 dtype=bf16",
        "attention sq=100 d=64 dtype=bf16 dropout=0.1", "attention sq=100 d=64 dtype=bf16 list=indices block=64x64"}) {
    EXPECT_THROW(plan_of(line, 90), Error) << line;
  }
  EXPECT_THROW(plan_of("attention sq=100 d=64 dtype=bf16", 80), Error);
  EXPECT_THROW(plan_of("attention sq=100 d=64 dtype=bf16", 100), Error);
}

// The blocks of one launch, in order: (plane, row tile), as Block::of decodes them.
std::vector<std::pair<int, int>> row_tiles_of(const cuda::BlockOrder& order, int blocks) {
  std::vector<std::pair<int, int>> all;
  const auto tiles = static_cast<int>(order.section.value);
  const auto planes = static_cast<int>(order.planes.value);
  for (int index = 0; index < blocks; ++index) {
    const int from_last = index % tiles / planes;
    all.emplace_back(index / tiles * planes + index % tiles % planes, order.tiles - 1 - from_last);
  }
  return all;
}

TEST_F(Launch, UnderACausalMaskTheLastRowsOfEveryHeadComeFirst) {
  const auto order_of = [&](const char* line) {
    const Problem problem = Problem::parse(line);
    Executor(make_plan(problem, Target::cuda_device(0))).run(dense(problem));
    cuda::FwdParams params{};
    std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
    auto all = row_tiles_of(params.order, static_cast<int>(gpu_.last.grid[0]));
    EXPECT_EQ(params.order.heads.value, 6U);
    const auto planes = static_cast<std::size_t>(6 * problem.batch);
    EXPECT_EQ(all.size(), planes * static_cast<std::size_t>(params.order.tiles));
    EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size()) << "each row tile once";
    EXPECT_LT(std::max_element(all.begin(), all.end())->first, static_cast<int>(planes));
    return all;
  };
  const auto last_of = [](const std::vector<std::pair<int, int>>& all) {
    std::size_t same = 0;
    while (same < all.size() && all[same].second == all.front().second) ++same;
    return same;
  };
  EXPECT_EQ(last_of(order_of("attention b=5 sq=1000 hq=6 d=64 dtype=bf16 causal")), 30U);  // of all planes
  // 4 MB a plane, 16 MB a section of at most 4 planes, of which there are to be whole ones.
  EXPECT_EQ(last_of(order_of("attention b=1 sq=16384 hq=6 d=64 dtype=bf16 causal")), 3U);
  EXPECT_EQ(last_of(order_of("attention b=5 sq=1000 hq=6 d=64 dtype=bf16")), 1U);
}

TEST_F(Launch, RunsNeitherAllocateNorLoad) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  const Bindings bindings = dense(problem_);
  executor.prepare();
  EXPECT_EQ(gpu_.launches, 0);
  const int modules = gpu_.modules;
  const int device_allocations = gpu_.allocations;
  EXPECT_EQ(allocations_of([&] { executor.run(bindings); }), 0);
  EXPECT_EQ(gpu_.modules, modules);
  EXPECT_EQ(gpu_.allocations, device_allocations);
  EXPECT_EQ(gpu_.launches, 1);
}

// Everything of a run but the driver's own work is this project's; the whole is to take 3 µs at most, of which a
// launch takes the driver about 2.
TEST_F(Launch, OurPartOfARunIsShort) {
#ifndef NDEBUG
  GTEST_SKIP() << "not an optimised build";
#endif
#if !TESSERA_OWN_ALLOCATOR
  GTEST_SKIP() << "a sanitizer slows it down";
#endif
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  const Bindings bindings = dense(problem_);
  executor.prepare();
  double best = 1e9;
  for (int repetition = 0; repetition < 200; ++repetition) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) executor.run(bindings);
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    best = std::min(best, taken.count() / 100);
  }
  RecordProperty("microseconds", std::to_string(best));
  std::cout << "a run takes " << best << " us of host time besides the driver's\n";
  EXPECT_LT(best, 2.0);
}

TEST_F(Launch, AnExecutorMovesWithItsKernels) {
  Executor first(make_plan(problem_, Target::cuda_device(0)));
  first.prepare();
  Executor second(std::move(first));
  const Bindings bindings = dense(problem_);
  EXPECT_EQ(allocations_of([&] { second.run(bindings); }), 0);
  EXPECT_EQ(gpu_.modules, 1);
  expect_error([&] { first.run(bindings); }, ErrorCode::invalid_argument,
               "executor");  // NOLINT(bugprone-use-after-move)
}

TEST_F(Launch, PlansOfOneConfigurationShareALoadedKernel) {
  Executor one(make_plan(problem_, Target::cuda_device(0)));
  Executor other(make_plan(Problem::parse("attention sq=290 hq=3 d=64 dtype=bf16"), Target::cuda_device(0)));
  one.prepare();
  other.prepare();
  EXPECT_EQ(gpu_.modules, 1);
}

TEST_F(Launch, AnotherContextHasKernelsOfItsOwn) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  const Bindings bindings = dense(problem_);
  executor.run(bindings);
  const void* first = gpu_.last.function;
  gpu_.context_id += 1;
  executor.run(bindings);
  EXPECT_EQ(gpu_.modules, 2);
  EXPECT_NE(gpu_.last.function, first);
  executor.run(bindings);
  EXPECT_EQ(gpu_.modules, 2);
}

TEST_F(Launch, CaptureOfAnUncompiledKernelSaysToWarmUp) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  const Bindings bindings = dense(problem_);
  const int compilations = testing::fake_compilations();
  for (const int status : {1, 2}) {  // active, invalidated
    gpu_.capture = status;
    try {
      executor.run(bindings);
      ADD_FAILURE() << "captured a kernel that is not there";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "stream");
      EXPECT_NE(error.got().find("fwd_mma"), std::string::npos) << error.got();
      EXPECT_NE(error.want().find("prepare()"), std::string::npos) << error.want();
    }
  }
  EXPECT_EQ(testing::fake_compilations(), compilations);
  EXPECT_EQ(gpu_.launches, 0);
  // After a warm-up it is captured, by any executor of that kernel.
  gpu_.capture = 0;
  executor.prepare();
  gpu_.capture = 1;
  executor.run(bindings);
  Executor another(make_plan(problem_, Target::cuda_device(0)));
  another.run(bindings);
  EXPECT_EQ(gpu_.launches, 2);
}

TEST_F(Launch, TheDriversRefusalIsAnErrorWithItsWords) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  const Bindings bindings = dense(problem_);
  gpu_.module_result = 218;
  try {
    executor.prepare();
    ADD_FAILURE() << "loaded what the driver refuses";
  } catch (const Error& error) {
    EXPECT_NE(error.got().find("12.9"), std::string::npos) << error.got();  // the driver's version and the compiler's
  }
  gpu_.module_result = 0;
  executor.prepare();
  gpu_.launch_result = 700;
  try {
    executor.run(bindings);
    ADD_FAILURE() << "launched what the driver refuses";
  } catch (const Error& error) {
    EXPECT_NE(error.got().find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << error.got();
  }
  gpu_.launch_result = 0;
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
}

TEST_F(Launch, NothingToComputeIsNoLaunch) {
  const Problem problem = Problem::parse("attention b=0 sq=10 d=64 dtype=bf16");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  executor.run(dense(problem));
  EXPECT_EQ(gpu_.launches, 0);
}

TEST_F(Launch, ReportModeChecksBeforeItComputesIfAStatusIsBound) {
  const Problem problem = Problem::parse("attention b=2 sq=30 hq=2 d=64 dtype=bf16 seqused_k metadata=report");
  const Plan plan = make_plan(problem, Target::cuda_device(0));
  ASSERT_EQ(plan.state().kernels.size(), 2U);
  gpu_.parameter_bytes = 0;  // two kernels, each with parameters of its own
  Executor executor(plan);
  executor.prepare();
  Bindings bindings = dense(problem);
  bindings[Slot::seqused_k] = tensor(DType::int32, {2});
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
  bindings[Slot::status] = tensor(DType::int32, {1});
  EXPECT_EQ(allocations_of([&] { executor.run(bindings); }), 0);
  EXPECT_EQ(gpu_.launches, 3);
  EXPECT_EQ(gpu_.last.shared_bytes, plan.state().kernels.front().shared_bytes);  // the forward comes last
}

TEST_F(Launch, ExtraTensorsOfATextReachTheKernel) {
  register_score("launch.bias", {"score + bias(at.head, at.query - at.key)", {{"bias", DType::bf16, 2}}});
  register_mask("launch.ids", {"ids(0, 0, 0, at.key) > t()", {{"ids", DType::int32, 4}, {"t", DType::int64, 0}}});
  const Problem problem =
      Problem::parse("attention b=2 sq=30 hq=4 d=64 dtype=bf16 score=launch.bias mask=launch.ids mass=mean");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  executor.prepare();
  Bindings bindings = dense(problem);
  bindings[Slot::tile_mass] = tensor(DType::fp32, {2, 4, 1, 1});
  Tensor& bias = bindings[Slot::extra0] = tensor(DType::bf16, {4, 100});
  bias.shape[1] = 59;  // a row's first 59 of 100, and from the third on
  bias.byte_offset = 2 * 3;
  bindings[Slot::extra1] = tensor(DType::int32, {2, 3, 4, 5});
  expect_error([&] { executor.run(bindings); }, ErrorCode::invalid_argument, "extra2");
  bindings[Slot::extra2] = tensor(DType::int64, {});
  gpu_.parameter_bytes = sizeof(cuda::FwdParams);
  EXPECT_EQ(allocations_of([&] { executor.run(bindings); }), 0);
  EXPECT_EQ(gpu_.launches, 3);  // the forward, the masses' two; the last reads the same parameters
  cuda::FwdParams params{};
  std::memcpy(static_cast<void*>(&params), gpu_.last.parameters.data(), sizeof(params));
  EXPECT_EQ(params.extras[0].data, static_cast<std::byte*>(bias.data) + 6);
  EXPECT_EQ(params.extras[0].sizes[0], 4);
  EXPECT_EQ(params.extras[0].sizes[1], 59);
  EXPECT_EQ(params.extras[0].strides[0], 100);
  EXPECT_EQ(params.extras[1].data, bindings[Slot::extra1].bytes());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(params.extras[1].sizes[i], i + 2);
  EXPECT_EQ(params.extras[1].strides[0], 60);
  EXPECT_EQ(params.extras[1].strides[1], 20);
  EXPECT_EQ(params.extras[1].strides[2], 5);
  EXPECT_EQ(params.extras[2].data, bindings[Slot::extra2].bytes());
  EXPECT_EQ(params.extras[3].data, nullptr);
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

TEST_F(Launch, HostFunctionsAreRefused) {
  register_score("launch.plain", {"score", {}});
  for (const char* name : {"relative", "launch.plain"}) {
    const Problem problem = Problem::parse(std::string("attention sq=30 d=64 dtype=bf16 score=") + name);
    Executor executor(make_plan(problem, Target::cuda_device(0)));
    Bindings bindings = dense(problem);
    executor.run(bindings);
    bindings.score.value = [](double score, const ScorePoint&, void*) { return score; };
    expect_error([&] { executor.run(bindings); }, ErrorCode::invalid_argument, "score");
  }
}

TEST_F(Launch, KvAppendTakesABlockForEachToken) {
  const Problem problem =
      Problem::parse("kv_append b=3 sq=5 sk=64 hq=4 hkv=2 d=64 dtype=bf16 kv=table page=16 rotary=half:64");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  EXPECT_EQ(executor.plan().implementation(), "cuda.kv_append");
  executor.prepare();
  Bindings bindings;
  bindings[Slot::k] = tensor(DType::bf16, {problem.kv.pages, 16, 2, 64});
  bindings[Slot::v] = tensor(DType::bf16, {problem.kv.pages, 16, 2, 64});
  bindings[Slot::k_new] = tensor(DType::bf16, {3, 5, 2, 64});
  bindings[Slot::v_new] = tensor(DType::bf16, {3, 5, 2, 64});
  bindings[Slot::page_table] = tensor(DType::int32, {3, 4});
  bindings[Slot::seqused_k] = tensor(DType::int32, {3});
  bindings[Slot::rotary_cos] = tensor(DType::fp32, {64, 32});
  bindings[Slot::rotary_sin] = tensor(DType::fp32, {64, 32});
  gpu_.parameter_bytes = 0;
  EXPECT_EQ(allocations_of([&] { executor.run(bindings); }), 0);
  EXPECT_EQ(gpu_.launches, 1);
  EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{5, 3, 1}));
}

TEST_F(Launch, BindingsOnTheHostAreRefused) {
  Executor executor(make_plan(problem_, Target::cuda_device(0)));
  Bindings bindings = dense(problem_);
  bindings[Slot::k].device = {DeviceType::cpu, 0};
  expect_error([&] { executor.run(bindings); }, ErrorCode::invalid_argument, "k");
  EXPECT_EQ(gpu_.launches, 0);
}

TEST_F(Launch, PlansForOtherChipsAreForEmulationOnly) {
  const Plan absent = make_plan(problem_, Target::cuda(120));
  expect_error([&] { Executor{absent}; }, ErrorCode::unsupported, "target");
  const Plan emulated = make_plan(problem_, Target::emulate(120, 0));
  Executor executor(emulated);
  executor.run(dense(problem_));
  EXPECT_EQ(gpu_.launches, 1);
  EXPECT_LE(gpu_.last.shared_bytes, 99U * 1024U);
}

TEST_F(Launch, WorkspacesAreAllocatedOnceAndFreed) {
  const int before = gpu_.allocations;
  {
    const Plan plan = make_plan(problem_, Target::cuda_device(0));
    Executor executor(plan);
    EXPECT_EQ(gpu_.allocations, before + (plan.workspace_bytes() > 0 ? 1 : 0));
  }
  EXPECT_EQ(gpu_.allocations, before);
}

}  // namespace
}  // namespace tessera
