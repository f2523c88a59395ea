// SPDX-License-Identifier: Apache-2.0
// What a GPU can do at most, by kernels of a few lines.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "bench_device.h"
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
/// Each thread asks for `loads` times 16 bytes before it uses any.
struct InPlace {
  int threads, loads;
};
constexpr InPlace kInPlace[] = {{128, 8}, {256, 4}, {128, 4}, {256, 8}};

cuda::KernelSource in_place_source(const InPlace& of) {
  std::string text = R"(#include "cuda/ptx/global.cuh"
#include "cuda/ptx/math.cuh"
using namespace tessera::cuda;
constexpr int loads = )" +
                     std::to_string(of.loads) +
                     R"(;
extern "C" __global__ void tessera_kernel(uint4* memory, float factor) {
  uint4* at = memory + static_cast<long long>(blockIdx.x) * blockDim.x * loads + threadIdx.x;
  u32 value[loads][4];
#pragma unroll
  for (int i = 0; i < loads; ++i) ptx::load_once_16(value[i], at + i * blockDim.x);
#pragma unroll
  for (int i = 0; i < loads; ++i) {
#pragma unroll
    for (u32& word : value[i]) word = __float_as_uint(__uint_as_float(word) * factor);
    ptx::store_16(at + i * blockDim.x, value[i]);
  }
}
)";
  return {"roofline: in place", std::move(text)};
}

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
double best_seconds(const cuda::Kernel& kernel, cuda::Dim3 grid, int threads, void** parameters, Stream stream) {
  const cuda::Driver& d = cuda::driver();
  const auto handle = static_cast<cuda::StreamHandle>(stream.handle);
  const Events events;
  float best = 1e9F;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    cuda::check(d.event_record(events.both[0], handle), "cuEventRecord");
    kernel.launch(grid, {static_cast<std::uint32_t>(threads)}, 0, handle, parameters);
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

/// GB/s of the best of some ways.
double measure_in_place(const Target& target, Stream stream) {
  const Memory memory(target.index, kInPlaceBytes);
  void* data = memory.data;
  float factor = 1.0F;
  void* parameters[] = {&data, &factor};
  double best = 1e9;
  for (const InPlace& way : kInPlace) {
    const auto a_block = static_cast<std::size_t>(way.threads * way.loads) * 16;
    const cuda::Dim3 grid{static_cast<std::uint32_t>(kInPlaceBytes / a_block)};
    const cuda::Kernel& pass = cuda::kernel(in_place_source(way), target, stream);
    best = std::min(best, best_seconds(pass, grid, way.threads, parameters, stream));
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
  const double product_seconds = best_seconds(products, grid, kWarps * 32, product_parameters, stream);

  const void* source = from.data;
  long long count = kCopyBytes / 16;
  void* copy_parameters[] = {&source, &sink, &count};
  const cuda::Kernel& copy = cuda::kernel({"roofline: copy", kCopy}, target, stream);
  const double copy_seconds = best_seconds(copy, grid, 512, copy_parameters, stream);

  Roofline roofline;
  roofline.gflops = kFlopsOfAProduct * kSums * kRounds * kWarps * blocks / product_seconds * 1e-9;
  roofline.gbytes_s = 2.0 * static_cast<double>(kCopyBytes) / copy_seconds * 1e-9;
  roofline.in_place_gbytes_s = measure_in_place(target, stream);
  return roofline;
}

}  // namespace tessera::cli
