// SPDX-License-Identifier: Apache-2.0
// What a GPU can do at most, by kernels of a few lines.
#include <algorithm>
#include <array>
#include <string>

#include "bench/device.h"
#include "bench/in_place.h"
#include "cases/device_copy.h"
#include "cuda/driver/device.h"
#include "cuda/jit/kernel.h"

namespace tessera::cli {
namespace {

constexpr int kAttempts = 5;
constexpr double kLaunchSeconds = 0.02;  // as long as a repetition of a measurement
constexpr double kProductSeconds = 1;    // half of it passes before anything counts, until power limits the clock

/// A kernel of products of bf16 in a loop; its parameters are (float* sink, int rounds).
struct Products {
  const char* name;
  const char* text;
  int blocks_a_multiprocessor;
  std::uint32_t threads;
  std::size_t shared_bytes;
  double flops_a_round;  // of a block
};

// Draws two numbers of N(0, 1) for `number`, by the method of Box and Muller.
constexpr const char* kNormalPair = R"(#include "cuda/ptx/math.cuh"
using namespace tessera::cuda;
__device__ __forceinline__ u32 normal_pair(u32 number) {
  u32 bits = (number + 1) * 0x9E3779B9U;
  bits = (bits ^ bits >> 16) * 0x85EBCA6BU;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35U;
  bits ^= bits >> 16;
  const float radius = sqrtf(-2.0F * __logf(((bits & 0xFFFF) + 1) / 65536.0F));
  const float angle = (bits >> 16) * (6.2831853F / 65536.0F);
  return ptx::pack<Element::bf16>(radius * __cosf(angle), radius * __sinf(angle));
}
)";

// Operands are N(0, 1), as those of the measurements: how many bits change decides the power, and power the clock.
constexpr const char* kMmaSync = R"(#include "cuda/ptx/mma_sync.cuh"
extern "C" __global__ void __launch_bounds__(128) tessera_kernel(float* sink, int rounds) {
  float sums[8][4] = {};
  u32 a[4], b[8][2];
  for (u32 i = 0; i < 4; ++i) a[i] = normal_pair(threadIdx.x * 20 + i);
  for (u32 i = 0; i < 16; ++i) b[i / 2][i % 2] = normal_pair(threadIdx.x * 20 + 4 + i);
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) ptx::mma_m16n8k16<Element::bf16>(sums[i], a, b[i][0], b[i][1]);
  }
  float sum = 0.0F;
  for (const auto& tile : sums) sum += tile[0] + tile[1] + tile[2] + tile[3];
  if (sum == 0.123F) *sink = sum;
}
)";

// Two warpgroups multiply 64 rows each by 256 columns, the widest product that there is, over a depth of 128. All
// rounds add to the same sums: the assembler leaves out products that others overwrite.
constexpr const char* kWgmma = R"(#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/tile/gemm_wgmma.cuh"
using A = SharedTile<Element::bf16, 64, 128>;
using B = SharedTile<Element::bf16, 256, 128>;
extern "C" __global__ void __launch_bounds__(256) tessera_kernel(float* sink, int rounds) {
  extern __shared__ __align__(1024) char memory[];
  const u32 b = ptx::shared_address(memory);
  for (u32 i = threadIdx.x; i < (B::bytes + 2 * A::bytes) / 4; i += 256) {
    ptx::store_shared_4(b + i * 4, normal_pair(i));
  }
  ptx::fence_async_proxy();
  __syncthreads();
  const u32 a = b + B::bytes + threadIdx.x / 128 * A::bytes;
  Accumulator<1, B::rows / 8> sums;
  sums.clear();
  for (int round = 0; round < rounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < B::columns / depth_of_product(A::type); ++k) {
      ptx::Wgmma<B::rows, Element::bf16>::from_shared(&sums.tile[0][0][0], Descriptor<A>::columns(a, k),
                                                      Descriptor<B>::columns(b, k), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    settle(sums);
  }
  float sum = 0.0F;
  for (const auto& tile : sums.tile[0]) sum += tile[0] + tile[1] + tile[2] + tile[3];
  if (sum == 0.123F) *sink = sum;
}
)";

constexpr std::size_t kCopyBytes = std::size_t{512} << 20U;
constexpr const char* kCopy =
    R"(extern "C" __global__ void tessera_kernel(const uint4* from, uint4* to, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) to[i] = from[i];
}
)";

constexpr std::size_t kInPlaceBytes = std::size_t{1} << 30U;
struct Events {
  Events() {
    for (cuda::EventHandle& event : both) cuda::check(cuda::driver().event_create(&event, 0), "cuEventCreate");
  }
  ~Events() {
    for (cuda::EventHandle event : both) cuda::driver().event_destroy(event);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  std::array<cuda::EventHandle, 2> both{};
};

/// Seconds of the fastest of some launches.
template <class Launch>
double best_seconds(Stream stream, const Launch& launch, int attempts = kAttempts) {
  const cuda::Driver& d = cuda::driver();
  const auto handle = static_cast<cuda::StreamHandle>(stream.handle);
  const Events events;
  float best = 1e9F;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    cuda::check(d.event_record(events.both[0], handle), "cuEventRecord");
    launch();
    cuda::check(d.event_record(events.both[1], handle), "cuEventRecord");
    cuda::check(d.stream_synchronize(handle), "cuStreamSynchronize");
    float milliseconds = 0;
    cuda::check(d.event_elapsed(&milliseconds, events.both[0], events.both[1]), "cuEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  return best * 1e-3;
}

/// Takes wgmma where the target's plans may. Two warpgroups of it, or 16 warps of mma.sync, keep a multiprocessor busy.
Products products_of(const Target& target) {
  if (target.sm == 90 && !target.emulated) {
    constexpr std::size_t kShared = (256 + 2 * 64) * 128 * 2;
    return {"wgmma", kWgmma, 1, 256, kShared, 2.0 * 128 * 256 * 128};
  }
  return {"mma.sync", kMmaSync, 4, 128, 0, 4 * 8 * 2.0 * 16 * 8 * 16};
}

/// GFLOP/s of the fastest launch after half a second of launches: by then the clock is what power allows.
double measure_products(const Products& products, const Target& target, Stream stream, void* sink) {
  const std::string name = std::string("roofline: ") + products.name;
  const cuda::Kernel& kernel =
      cuda::kernel({name, std::string(kNormalPair) + products.text, products.shared_bytes}, target, stream);
  const int blocks = target.multiprocessors * products.blocks_a_multiprocessor;
  int rounds = 1000;
  void* parameters[] = {&sink, &rounds};
  const auto launch = [&] {
    kernel.launch({static_cast<std::uint32_t>(blocks)}, {products.threads}, products.shared_bytes, stream.handle,
                  parameters);
  };
  rounds = std::max(1, static_cast<int>(rounds * kLaunchSeconds / best_seconds(stream, launch, kAttempts)));
  const int launches = static_cast<int>(kProductSeconds / kLaunchSeconds / 2);
  best_seconds(stream, launch, launches);
  return products.flops_a_round * rounds * blocks / best_seconds(stream, launch, launches) * 1e-9;
}

struct Memory {
  Memory(int device, std::size_t bytes) : index(device), data(cuda::allocate(device, bytes)) {}
  ~Memory() { cuda::release(index, data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  int index;
  void* data;
};

/// GB/s of the best way.
double measure_in_place(const Target& target, Stream stream) {
  const Memory memory(target.index, kInPlaceBytes);
  double best = 1e9;
  for (const InPlaceWay& way : in_place_ways()) {
    const InPlacePass pass(way.threads, way.loads, target, stream);
    best = std::min(best, best_seconds(stream, [&] { pass.launch(memory.data, kInPlaceBytes, stream); }));
  }
  return 2.0 * static_cast<double>(kInPlaceBytes) / best * 1e-9;
}

}  // namespace

Roofline measure_device_roofline(const Target& target) {
  const cuda::CurrentContext context(target.index);
  const Stream stream = cases::device_stream(target.index);
  const Memory from(target.index, kCopyBytes);
  const Memory to(target.index, kCopyBytes);
  const cuda::Dim3 grid{static_cast<std::uint32_t>(target.multiprocessors * 4)};
  void* sink = to.data;
  const Products products = products_of(target);

  const void* source = from.data;
  long long count = kCopyBytes / 16;
  void* copy_parameters[] = {&source, &sink, &count};
  const cuda::Kernel& copy = cuda::kernel({"roofline: copy", kCopy}, target, stream);
  const double copy_seconds =
      best_seconds(stream, [&] { copy.launch(grid, {512}, 0, stream.handle, copy_parameters); });

  Roofline roofline;
  roofline.products = products.name;
  roofline.gflops = measure_products(products, target, stream, sink);
  roofline.gbytes_s = 2.0 * static_cast<double>(kCopyBytes) / copy_seconds * 1e-9;
  roofline.in_place_gbytes_s = measure_in_place(target, stream);
  return roofline;
}

}  // namespace tessera::cli
