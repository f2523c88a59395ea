// SPDX-License-Identifier: Apache-2.0
// Executor::run allocates nothing.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "core/call.h"
#include "malloc/allocations.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

class NoAllocation : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!TESSERA_OWN_ALLOCATOR) GTEST_SKIP() << "a sanitizer owns the allocator";
  }
};

TEST_P(NoAllocation, InRun) {
  for (const int threads : {1, 2}) {
    Call call(GetParam());
    Executor executor(make_plan(call.problem, Target::cpu(threads)));
    executor.run(call.bindings);  // OpenMP allocates its team on first use
    EXPECT_EQ(allocations_of([&] { executor.run(call.bindings); }), 0) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Problems, NoAllocation,
    testing::Values(
        "attention b=2 sq=150 hq=4 hkv=2 causal lse", "attention sq=1 sk=3000 hq=4 hkv=1 dtype=bf16",
        "attention b=3 sq=70 hq=2 layout=varlen dtype=fp16 seqused_q seqused_k",
        "attention b=2 sq=3 sk=130 kv=table page=16 dtype=bf16", "attention b=2 sq=70 sk=130 kv=csr page=8",
        "attention sq=70 kv2=dense sk2=100 alibi softcap=30 sink dropout=0.1",
        "attention sq=100 score=relative mask=document", "attention sq=100 d=16 dv=40 compressed_causal=32:16",
        "attention sq=200 hq=2 list=indices:q:b:full mass=mean next=indices", "attention sq=200 list=transposed",
        "attention sq=200 list=bitmask:1:1 mass=rms next=bitmask mass_lse=prior lse",
        "attention b=2 sq=200 hq=2 list=bitmask skip=mass", "attention sq=200 list=bitmask skip=threshold dtype=bf16",
        "attention pass=backward b=2 sq=150 hq=4 hkv=2 causal dtype=bf16",
        "attention pass=backward b=2 sq=90 layout=varlen sink dlse grad=fp32 accumulate deterministic",
        "attention pass=backward sq=90 kv2=dense sk2=50 dropout=0.2 score=soft_clip mask=prefix alibi",
        "attention pass=backward sq=200 list=transposed bwd_list=indices:q:b:full",
        "combine b=2 sq=40 hq=3 parts=4 lse sink",
        "kv_append b=2 sq=4 sk=64 kv=table page=16 rotary=half:32 dtype=bf16",
        "kv_append b=2 sq=4 sk=64 hq=2 rotary=interleaved:64",
        "linear_decode b=3 t=3 h=2 d=128 dtype=bf16 state=bf16 slots=5", "linear_decode b=2 h=2 layout=kv",
        "linear_decode b=3 t=3 h=2 d=128 dtype=bf16 slots=5 ring=7", "linear_decode b=2 t=0 layout=kv ring=9",
        "linear_decode b=2 state=bf16 rounding=stochastic", "linear_chunk b=2 t=150 h=2 dtype=bf16 slots=3",
        "linear_chunk pass=backward b=2 t=150 h=2 dtype=fp16 slots=3 layout=kv",
        "nsa_pool b=2 sk=300 hkv=2 dtype=bf16 kv=varlen length=32 stride=16 project",
        "nsa_pool pass=backward b=2 sk=300 hkv=2 dtype=fp16 length=32 stride=16 project",
        "nsa_select b=2 sq=300 hq=4 hkv=2 dtype=bf16 tile=32 causal",
        "nsa_select b=2 sq=300 hq=4 hkv=2 dtype=bf16 length=8 tile=32 compressed_top=5 compressed_block=4 causal",
        "nsa_select b=2 sq=300 hq=4 hkv=2 layout=varlen length=32 stride=16 block=64 score=softmax reduce=max tile=8",
        "nsa_gate b=2 sq=100 hq=3 dtype=bf16", "nsa_gate pass=backward b=2 sq=100 hq=3 layout=varlen",
        "nsa_gate pass=backward sq=100 gate=given", "attention b=2 sq=70 hq=4 hkv=2 dtype=e4m3:e4m3:e5m2:bf16 smooth",
        "attention sq=70 dtype=int8:int8:bf16:bf16 descale=block:32", "quantize b=2 sq=70 hq=2 dtype=bf16 hadamard",
        "quantize sq=70 to=int8 descale=token smooth saturated"));

TEST(NoAllocationThroughC, InRun) {
  if (!TESSERA_OWN_ALLOCATOR) GTEST_SKIP() << "a sanitizer owns the allocator";
  const std::int64_t shape[] = {1, 64, 1, 64};
  std::vector<float> memory(4096);
  std::vector<float> result(4096);
  tessera_problem* problem = nullptr;
  tessera_plan* plan = nullptr;
  tessera_bindings* bindings = nullptr;
  tessera_executor* executor = nullptr;
  ASSERT_EQ(tessera_problem_parse("attention sq=64", &problem), TESSERA_OK);
  ASSERT_EQ(tessera_plan_make(problem, nullptr, nullptr, &plan), TESSERA_OK);
  ASSERT_EQ(tessera_bindings_create(&bindings), TESSERA_OK);
  ASSERT_EQ(tessera_executor_create(plan, &executor), TESSERA_OK);
  tessera_tensor tensor;
  ASSERT_EQ(tessera_tensor_contiguous(&tensor, memory.data(), TESSERA_FP32, shape, 4), TESSERA_OK);
  for (const char* slot : {"q", "k", "v"}) ASSERT_EQ(tessera_bindings_set(bindings, slot, &tensor), TESSERA_OK);
  tensor.data = result.data();
  ASSERT_EQ(tessera_bindings_set(bindings, "o", &tensor), TESSERA_OK);
  ASSERT_EQ(tessera_executor_run(executor, bindings, nullptr), TESSERA_OK) << tessera_last_error();
  int code = -1;
  EXPECT_EQ(allocations_of([&] { code = tessera_executor_run(executor, bindings, nullptr); }), 0);
  EXPECT_EQ(code, TESSERA_OK);
  // Binding by name is part of a call's path too.
  EXPECT_EQ(allocations_of([&] { code = tessera_bindings_set(bindings, "o", &tensor); }), 0);
  tessera_executor_destroy(executor);
  tessera_bindings_destroy(bindings);
  tessera_plan_destroy(plan);
  tessera_problem_destroy(problem);
}

TEST(Counter, SeesEveryWayToAllocate) {
  if (!TESSERA_OWN_ALLOCATOR) GTEST_SKIP() << "a sanitizer owns the allocator";
  const auto seen = [](auto allocate) { return allocations_of(allocate) == 1; };
  void* volatile memory = nullptr;
  EXPECT_TRUE(seen([&] { memory = std::malloc(8); }));
  EXPECT_TRUE(seen([&] { memory = std::realloc(memory, 800); }));
  std::free(memory);
  EXPECT_TRUE(seen([&] { memory = std::calloc(2, 8); }));
  std::free(memory);
  EXPECT_TRUE(seen([&] { memory = std::aligned_alloc(64, 64); }));
  std::free(memory);
  EXPECT_TRUE(seen([&] { memory = ::operator new(8); }));
  ::operator delete(memory);
  EXPECT_TRUE(seen([&] { memory = ::operator new(64, std::align_val_t{64}); }));
  ::operator delete(memory, std::align_val_t{64});
}

}  // namespace
}  // namespace tessera
