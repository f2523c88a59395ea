// SPDX-License-Identifier: Apache-2.0
// What a GPU can do at most, by kernels of a few lines.
#include <algorithm>
#include <array>

#include "bench_device.h"
#include "bench_in_place.h"
#include "cases/device_copy.h"
#include "cuda/jit/device.h"
#include "cuda/jit/kernel.h"

namespace tessera::cli {
namespace {

constexpr int kWarps = 4;             // a block
constexpr int kBlocksAProcessor = 4;  // 16 warps keep the tensor cores of a multiprocessor busy
constexpr int kSums = 8;              // independent products a warp
constexpr int kRounds = 20000;
constexpr int kAttempts = 5;

// Operands are around 1 and differ from lane to lane: zeros would draw less power and so run at a higher clock.
constexpr const char* kProducts = R"(#include "cuda/ptx/mma_sync.cuh"
using namespace tessera::cuda;
extern "C" __global__ void __launch_bounds__(128) tessera_kernel(float* sink, int rounds) {
  float sums[8][4] = {};
  const u32 a[4] = {0x3f813f80u + threadIdx.x % 29, 0x3f853f83u + threadIdx.x % 23, 0xbf84bf81u, 0x3f823f87u};
  const u32 b = 0xbf803f80u + threadIdx.x % 31;
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) ptx::mma_m16n8k16<Element::bf16>(sums[i], a, b + i, b ^ i);
  }
  float sum = 0.0F;
  for (const auto& tile : sums) sum += tile[0] + tile[1] + tile[2] + tile[3];
  if (sum == 0.123F) *sink = sum;
}
)";
constexpr double kFlopsOfAProduct = 2.0 * 16 * 8 * 16;

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
double best_seconds(Stream stream, const Launch& launch) {
  const cuda::Driver& d = cuda::driver();
  const auto handle = static_cast<cuda::StreamHandle>(stream.handle);
  const Events events;
  float best = 1e9F;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
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
  const int blocks = target.multiprocessors * kBlocksAProcessor;
  const cuda::Dim3 grid{static_cast<std::uint32_t>(blocks)};

  void* sink = to.data;
  int rounds = kRounds;
  void* product_parameters[] = {&sink, &rounds};
  const cuda::Kernel& products = cuda::kernel({"roofline: products", kProducts}, target, stream);
  const double product_seconds =
      best_seconds(stream, [&] { products.launch(grid, {kWarps * 32}, 0, stream.handle, product_parameters); });

  const void* source = from.data;
  long long count = kCopyBytes / 16;
  void* copy_parameters[] = {&source, &sink, &count};
  const cuda::Kernel& copy = cuda::kernel({"roofline: copy", kCopy}, target, stream);
  const double copy_seconds =
      best_seconds(stream, [&] { copy.launch(grid, {512}, 0, stream.handle, copy_parameters); });

  Roofline roofline;
  roofline.gflops = kFlopsOfAProduct * kSums * kRounds * kWarps * blocks / product_seconds * 1e-9;
  roofline.gbytes_s = 2.0 * static_cast<double>(kCopyBytes) / copy_seconds * 1e-9;
  roofline.in_place_gbytes_s = measure_in_place(target, stream);
  return roofline;
}

}  // namespace tessera::cli
