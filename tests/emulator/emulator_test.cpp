// SPDX-License-Identifier: Apache-2.0
// Small kernels, right and wrong ones: what the emulator computes, and that it tells of every kind of mistake it is
// for.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/jit/headers.h"
#include "fakes/fakes.h"
#include "fakes/launch_config.h"

namespace {

using tessera::testing::fake_symbol;

template <class Function>
Function* driver(const char* name) {
  return fake_symbol<Function>(std::string(TESSERA_EMULATOR) + "/libcuda.so.1", name);
}
template <class Function>
Function* compiler(const char* name) {
  return fake_symbol<Function>(std::string(TESSERA_EMULATOR) + "/libnvrtc.so.12", name);
}

/// The cubin; "" and the compiler's words as a failure of the test.
std::string compile(const std::string& source) {
  const auto headers = tessera::cuda::embedded_headers();
  std::vector<const char*> names, texts;
  for (const auto& header : headers) {
    names.push_back(header.name);
    texts.push_back(header.text);
  }
  void* program = nullptr;
  compiler<int(void**, const char*, const char*, int, const char* const*, const char* const*)>("nvrtcCreateProgram")(
      &program, source.c_str(), "test", static_cast<int>(names.size()), texts.data(), names.data());
  const char* option = "--gpu-architecture=sm_90a";
  const int result = compiler<int(void*, int, const char* const*)>("nvrtcCompileProgram")(program, 1, &option);
  std::size_t bytes = 0;
  std::string text;
  compiler<int(void*, std::size_t*)>(result == 0 ? "nvrtcGetCUBINSize" : "nvrtcGetProgramLogSize")(program, &bytes);
  text.resize(bytes);
  compiler<int(void*, char*)>(result == 0 ? "nvrtcGetCUBIN" : "nvrtcGetProgramLog")(program, text.data());
  compiler<int(void**)>("nvrtcDestroyProgram")(&program);
  if (result == 0) return text;
  ADD_FAILURE() << text;
  return "";
}

struct Ran {
  std::string failure;  // "" when the launch succeeded
  std::vector<float> out;
};

/// Runs `body` in blocks of `threads` threads with `shared` bytes in `memory`; `out` has `count` floats, all NaN
/// before.
Ran run(const std::string& body, int threads, std::uint32_t shared = 0, std::size_t count = 256, int blocks = 1) {
  const std::string cubin = compile(
      "#include \"cuda/ptx/cp_async.cuh\"\n#include \"cuda/ptx/ldmatrix.cuh\"\n#include \"cuda/ptx/math.cuh\"\n"
      "#include \"cuda/ptx/mbarrier.cuh\"\n#include \"cuda/ptx/mma_sync.cuh\"\n#include \"cuda/ptx/tma.cuh\"\n"
      "#include \"cuda/ptx/warpgroup.cuh\"\n#include \"cuda/ptx/wgmma.cuh\"\nusing namespace tessera::cuda;\n"
      "extern \"C\" __global__ void tessera_kernel(const __grid_constant__ float* out) {\n"
      "  extern __shared__ __align__(1024) char memory[];\n  const int t = static_cast<int>(threadIdx.x);\n" +
      body + "}\n");
  if (cubin.empty()) return {"does not compile", {}};
  void* module = nullptr;
  void* function = nullptr;
  EXPECT_EQ(driver<int(void**, const void*)>("cuModuleLoadData")(&module, cubin.data()), 0);
  driver<int(void**, void*, const char*)>("cuModuleGetFunction")(&function, module, "tessera_kernel");
  std::uint64_t out = 0;
  driver<int(std::uint64_t*, std::size_t)>("cuMemAlloc_v2")(&out, count * 4);
  const LaunchConfig config{{static_cast<std::uint32_t>(blocks), 1, 1},
                            {static_cast<std::uint32_t>(threads), 1, 1},
                            shared,
                            nullptr,
                            nullptr,
                            0};
  std::array<void*, 1> parameters = {&out};
  const int result = driver<int(const LaunchConfig*, void*, void**, void**)>("cuLaunchKernelEx")(
      &config, function, parameters.data(), nullptr);
  const char* words = "";
  if (result != 0) driver<int(int, const char**)>("cuGetErrorString")(result, &words);
  Ran ran{words, std::vector<float>(count)};
  driver<int(void*, std::uint64_t, std::size_t)>("cuMemcpyDtoH_v2")(ran.out.data(), out, count * 4);
  driver<int(std::uint64_t)>("cuMemFree_v2")(out);
  driver<int(void*)>("cuModuleUnload")(module);
  return ran;
}

void expect_failure(const Ran& ran, const std::string& words) {
  EXPECT_NE(ran.failure.find(words), std::string::npos) << "got: " << ran.failure << "\nwant: " << words;
}

constexpr const char* kFloats = "float* f = reinterpret_cast<float*>(memory); float* o = const_cast<float*>(out);\n";

TEST(Emulator, BlocksShareMemoryAndWarpsShuffle) {
  const Ran ran = run(std::string(kFloats) + R"(
      const int n = blockIdx.x * 64 + t;
      f[t] = __shfl_xor_sync(0xffffffffU, static_cast<float>(n), 1);
      __syncthreads();
      o[n] = f[63 - t];)",
                      64, 256, 128, 2);
  EXPECT_EQ(ran.failure, "");
  for (int n = 0; n < 128; ++n) {
    const int from = n / 64 * 64 + 63 - n % 64;
    ASSERT_EQ(ran.out[static_cast<std::size_t>(n)], static_cast<float>(from ^ 1)) << n;
  }
}

TEST(Emulator, TensorCoresMultiply) {
  // A = row + 1 in all columns, B = 1 where the row is the column, else 0.
  const Ran ran = run(std::string(kFloats) + R"(
      const float g = t / 4 + 1.0F, h = t / 4 + 9.0F;
      const u32 a[4] = {ptx::pack<Element::bf16>(g, g), ptx::pack<Element::bf16>(h, h), ptx::pack<Element::bf16>(g, g),
                        ptx::pack<Element::bf16>(h, h)};
      const int k = t % 4 * 2, n = t / 4;
      float c[4] = {};
      ptx::mma_m16n8k16<Element::bf16>(c, a, ptx::pack<Element::bf16>(k == n, k + 1 == n), 0);
      for (int i = 0; i < 4; ++i) o[t * 4 + i] = c[i];)",
                      32, 0, 128);
  EXPECT_EQ(ran.failure, "");
  for (std::size_t i = 0; i < 128; ++i) ASSERT_EQ(ran.out[i], static_cast<float>(i / 16 + (i % 4 < 2 ? 1 : 9))) << i;
}

TEST(Emulator, ThreadsThatWaitForeverAreNamed) {
  expect_failure(run("if (t % 32 == 0) __shfl_sync(0xffffffffU, t, 0);\n", 64),
                 "threads 0, 32 wait for a shuffle (lanes 00000001 of ffffffff are there, some have ended) at ");
  expect_failure(run("if (t < 32) ptx::barrier_sync(1, 64);\n", 64), "barrier 1, 32 of 64 threads");
}

TEST(Emulator, BarriersThatCountOtherThreadsAreRefused) {
  expect_failure(run("ptx::barrier_sync(2, t < 32 ? 64 : 96);\n", 96), "is one of");
  expect_failure(run("ptx::barrier_sync(2, 48);\n", 64), "a barrier of 48 of the block's 64 threads");
}

TEST(Emulator, OperationsOfAWarpThatMeetAreTheSame) {
  expect_failure(run("if (t < 16) __syncwarp(); else __ballot_sync(0xffffffffU, 1);\n", 32), " in one warp");
}

TEST(Emulator, MissingBarriersAreSeen) {
  const std::string exchange = std::string(kFloats) + "f[t] = 1.0F; __syncthreads(); f[t] = 2.0F;\n";
  const Ran right = run(exchange + "__syncthreads(); o[t] = f[255 - t];\n", 256, 1024);
  const Ran wrong = run(exchange + "o[t] = f[255 - t];\n", 256, 1024);
  int stale = 0;
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_EQ(right.out[i], 2.0F);
    stale += static_cast<int>(wrong.out[i] == 1.0F);
  }
  EXPECT_GT(stale, 0);
}

TEST(Emulator, SharedMemoryBeginsAsNan) {
  const Ran ran = run(std::string(kFloats) + "o[t] = f[t]; f[t] = 1.0F;\n", 32, 128, 64, 2);
  EXPECT_TRUE(std::isnan(ran.out[0]));
}

TEST(Emulator, SharedMemoryEnds) {
  expect_failure(run("ptx::store_shared_4(ptx::shared_address(memory) + 128, 0);\n", 32, 128),
                 "4 bytes of shared memory at 128 of 128");
  expect_failure(run("ptx::store_shared_8(ptx::shared_address(memory) + 4, 0.0F, 0.0F);\n", 32, 128), "not aligned");
  expect_failure(run(std::string(kFloats) + "f[32 + t] = 0.0F;\n", 32, 128),
                 "something was written 0 bytes behind the 128 of shared memory");
  expect_failure(run(std::string(kFloats) + "o[t] = f[1024 + t];\n", 32, 128), " of 128 of shared memory");
  expect_failure(run("", 32, 64 * 1024), "more shared memory than asked for");
}

TEST(Emulator, GlobalMemoryEnds) {
  expect_failure(run(std::string(kFloats) + "o[256 + t] = 0.0F;\n", 32), " of 1024 of an allocation");
  expect_failure(run(std::string(kFloats) + "if (t < 4) o[248 + t] = 0.0F;\n", 32, 0, 250),
                 "something was written 0 bytes behind the 1000 of an allocation");
  expect_failure(run(std::string(kFloats) + "const u32 v[4] = {}; ptx::store_16(o + 1, v);\n", 32),
                 "16 bytes at no multiple of 16");
}

TEST(Emulator, CopiesComeWhenTheyAreWaitedFor) {
  const std::string copy = std::string(kFloats) + R"(
      if (t < 4) o[t] = t + 1.0F;
      __syncthreads();
      if (t == 0) {
        f[0] = 7.0F;
        ptx::cp_async_16(ptx::shared_address(memory), o);
        ptx::cp_async_commit();
        o[8] = f[0];
        ptx::cp_async_wait<0>();
        o[9] = f[3];
      })";
  const Ran ran = run(copy, 32, 1024);
  EXPECT_EQ(ran.failure, "");
  EXPECT_TRUE(std::isnan(ran.out[8])) << "neither what was there nor what comes";
  EXPECT_EQ(ran.out[9], 4.0F);
}

TEST(Emulator, BoxesByTmaComeLateAndInAnyOrder) {
  constexpr std::size_t columns = 32, rows = 16, row_bytes = columns * 2;
  std::vector<std::uint16_t> ones(columns * rows, 0x3f80);  // bf16
  alignas(64) std::array<char, 128> map{};
  const std::array<std::uint64_t, 4> sizes{columns, 1, rows, 1};
  const std::array<std::uint64_t, 3> strides{row_bytes, row_bytes, row_bytes * rows};
  const std::array<std::uint32_t, 4> box{columns, 1, 8, 1}, steps{1, 1, 1, 1};
  ASSERT_EQ((driver<int(void*, int, std::uint32_t, void*, const std::uint64_t*, const std::uint64_t*,
                        const std::uint32_t*, const std::uint32_t*, int, int, int, int)>("cuTensorMapEncodeTiled")(
                map.data(), 1, 4, ones.data(), sizes.data(), strides.data(), box.data(), steps.data(), 0, 2, 0, 0)),
            0);
  const Ran ran = run(std::string(kFloats) + R"(
      const u32 b = ptx::shared_address(memory);
      if (t == 0) {
        const void* map = reinterpret_cast<const void*>()" +
                          std::to_string(reinterpret_cast<std::uintptr_t>(map.data())) + R"(ULL);
        for (int i = 0; i < 2; ++i) {
          ptx::mbarrier_init(b + 8 * i, 1);
          ptx::mbarrier_arrive_expecting(b + 8 * i, 512);
          f[256 + 128 * i] = 7.0F;
          ptx::tma_load(b + 1024 + 512 * i, map, b + 8 * i, 0, 0, 8 * i, 0);
        }
        o[blockIdx.x * 4] = f[384];
        ptx::mbarrier_wait(b + 8, 0);
        o[blockIdx.x * 4 + 1] = f[256];
        o[blockIdx.x * 4 + 2] = f[384];
        ptx::mbarrier_wait(b, 0);
        o[blockIdx.x * 4 + 3] = f[256];
      })",
                      32, 4096, 256, 64);
  EXPECT_EQ(ran.failure, "");
  int first_came_first = 0;
  for (std::size_t i = 0; i < 256; i += 4) {
    EXPECT_TRUE(std::isnan(ran.out[i])) << "neither what was there nor what comes";
    first_came_first += static_cast<int>(!std::isnan(ran.out[i + 1]));
    EXPECT_NEAR(ran.out[i + 2], 1.0F, 0.01F);
    EXPECT_NEAR(ran.out[i + 3], 1.0F, 0.01F);
  }
  EXPECT_GT(first_came_first, 10);
  EXPECT_LT(first_came_first, 54);
}

// A and B of ones in bf16, rows of 64 bytes along the depth, whatever the swizzle.
std::string group_product(const std::string& end) {
  return std::string(kFloats) + R"(
      for (int i = t; i < 64 * 32 * 2; i += 128) reinterpret_cast<unsigned short*>(memory)[i] = 0x3f80;
      __syncthreads();
      float d[16];
      for (float& each : d) each = 5.0F;
      const u64 a = u64{1} << 63 | u64{512 / 16} << 32 | ptx::shared_address(memory) / 16;
      ptx::wgmma_fence();
      ptx::Wgmma<32, Element::bf16>::from_shared(d, a, a + 4096 / 16, true);
      ptx::wgmma_commit();
      o[t] = d[15];)" +
         end;
}

TEST(Emulator, ProductsOfWarpgroupsComeWhenTheyAreWaitedFor) {
  const Ran ran = run(group_product("ptx::wgmma_wait<0>(); o[128 + t] = d[15];\n"), 128, 8192);
  EXPECT_EQ(ran.failure, "");
  EXPECT_EQ(ran.out[0], 5.0F);
  for (std::size_t i = 128; i < 256; ++i) ASSERT_EQ(ran.out[i], 21.0F);
  expect_failure(run(group_product(""), 128, 8192), "products of wgmma that nobody waited for");
}

TEST(Emulator, MbarriersCount) {
  const std::string begin =
      "const u32 b = ptx::shared_address(memory); if (t == 0) ptx::mbarrier_init(b, 1);\n"
      "__syncthreads();\n";
  EXPECT_EQ(run(begin + "if (t == 9) ptx::mbarrier_arrive(b); ptx::mbarrier_wait(b, 0);\n", 32, 64).failure, "");
  expect_failure(run("ptx::mbarrier_wait(ptx::shared_address(memory), 0);\n", 32, 64), "no mbarrier was initialised");
  expect_failure(run(begin + "if (t == 9) ptx::mbarrier_arrive_expecting(b, 16);\nptx::mbarrier_wait(b, 0);\n", 32, 64),
                 "1 of 1 arrivals, 16 bytes missing");
  expect_failure(run(begin + "if (t == 9) ptx::mbarrier_arrive_expecting(b, 16);\n", 32, 64),
                 "the block ends while copies are under way");
  expect_failure(run(begin + "if (t == 9) ptx::mbarrier_arrive_expecting(b, 16);\n"
                             "__syncwarp();\nif (t == 0) ptx::mbarrier_arrive(b);\n",
                     32, 64),
                 "one arrival too many");
  expect_failure(run(begin + "*reinterpret_cast<float*>(memory) = 0.0F;\nptx::mbarrier_wait(b, 0);\n", 32, 64),
                 "the mbarrier was overwritten");
}

TEST(Emulator, UndefinedBehaviourEndsTheLaunch) {
  expect_failure(run(std::string(kFloats) + "*reinterpret_cast<float4*>(o + 1) = make_float4(0, 0, 0, 0);\n", 32),
                 "a vector at an address that is not aligned");
  expect_failure(run("int kept[4] = {}; kept[t % 8] = t; if (kept[t % 4] < 0) __syncthreads();\n", 32),
                 "an index behind an array's end");
}

TEST(Emulator, WhatTheCompilerMayAssumeHolds) {
  expect_failure(run("__builtin_assume(t < 31);\n", 32), "does not hold: t < 31");
}

}  // namespace
