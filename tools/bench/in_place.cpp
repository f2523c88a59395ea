// SPDX-License-Identifier: Apache-2.0
#include "bench/in_place.h"

#include <string>
#include <utility>

namespace tessera::cli {
namespace {

cuda::KernelSource source_of(int loads) {
  std::string text = "#include \"cuda/ptx/global.cuh\"\n#include \"cuda/ptx/math.cuh\"\nconstexpr int loads = " +
                     std::to_string(loads) + ";\n";
  text += R"(using namespace tessera::cuda;
extern "C" __global__ void tessera_kernel(uint4* memory, float factor) {
  uint4* at = memory + static_cast<long long>(blockIdx.x) * blockDim.x * loads + threadIdx.x;
  u32 value[loads][4];
#pragma unroll
  for (int i = 0; i < loads; ++i) ptx::load_once_16(value[i], at + i * blockDim.x);
#pragma unroll
  for (int i = 0; i < loads; ++i) {
#pragma unroll
    for (u32& word : value[i]) word = __float_as_uint(__uint_as_float(word) * factor);
    ptx::store_once_16(at + i * blockDim.x, value[i]);
  }
}
)";
  return {"roofline: in place", std::move(text)};
}

}  // namespace

InPlacePass::InPlacePass(int threads, int loads, const Target& target, Stream stream)
    : threads_(threads), loads_(loads), kernel_(&cuda::kernel(source_of(loads), target, stream)) {}

void InPlacePass::launch(void* memory, std::size_t bytes, Stream stream) const {
  float factor = 1.0F;
  void* parameters[] = {&memory, &factor};
  kernel_->launch({static_cast<std::uint32_t>(bytes / a_block())}, {static_cast<std::uint32_t>(threads_)}, 0,
                  stream.handle, parameters);
}

std::span<const InPlaceWay> in_place_ways() noexcept {
  static constexpr InPlaceWay kWays[] = {{128, 1}, {256, 1}, {128, 2}, {128, 8}};
  return kWays;
}

}  // namespace tessera::cli
