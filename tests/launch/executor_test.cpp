// SPDX-License-Identifier: Apache-2.0
// An executor on a GPU, as far as its host side goes: stand-ins take the places of the driver and of NVRTC.
#include "tessera/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/expect_error.h"
#include "launch/launch.h"
#include "malloc/allocations.h"
#include "plan/implementations.h"
#include "tessera/callable.h"

namespace tessera {
namespace {

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
  Executor other(make_plan(Problem::parse("attention sq=290 hq=3 d=64 dtype=bf16 causal"), Target::cuda_device(0)));
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
      EXPECT_NE(error.got().find("fwd_wgmma"), std::string::npos) << error.got();
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
  EXPECT_EQ(gpu_.last.attributes, 0U);
  EXPECT_EQ(gpu_.last.grid, (std::array<std::uint32_t, 3>{5, 3, 1}));
}

// 708 bytes between tokens, 118 between heads.
TEST_F(Launch, KvAppendTakesRowsThatAreNoMultipleOf16Bytes) {
  const Problem problem = Problem::parse("kv_append b=2 sq=1 sk=64 hq=6 d=59 dtype=fp16 rotary=interleaved:16");
  Executor executor(make_plan(problem, Target::cuda_device(0)));
  Bindings bindings;
  for (const Slot slot : {Slot::k, Slot::v}) bindings[slot] = tensor(DType::fp16, {2, 64, 6, 59});
  for (const Slot slot : {Slot::k_new, Slot::v_new, Slot::q, Slot::q_rotated}) {
    bindings[slot] = tensor(DType::fp16, {2, 1, 6, 59});
  }
  bindings[Slot::seqused_k] = tensor(DType::int32, {2});
  for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) bindings[slot] = tensor(DType::fp16, {64, 8});
  gpu_.parameter_bytes = 0;
  executor.run(bindings);
  EXPECT_EQ(gpu_.launches, 1);
  const Problem whole = Problem::parse("kv_append b=2 sq=1 sk=64 hq=6 d=64 dtype=fp16");
  Bindings gaps;
  for (const Slot slot : {Slot::k, Slot::v}) gaps[slot] = tensor(DType::fp16, {2, 64, 6, 64});
  for (const Slot slot : {Slot::k_new, Slot::v_new}) gaps[slot] = tensor(DType::fp16, {2, 1, 6, 64});
  gaps[Slot::seqused_k] = bindings[Slot::seqused_k];
  gaps[Slot::k_new].strides[2] = 65;
  expect_error([&] { Executor(make_plan(whole, Target::cuda_device(0))).run(gaps); }, ErrorCode::invalid_argument,
               "k_new");
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
