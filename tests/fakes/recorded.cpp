// SPDX-License-Identifier: Apache-2.0
// What a driver does with kernels, here written down for the test (FakeCuda) and not done.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fakes/cuda.h"
#include "fakes/launch_config.h"
#include "fakes/tensor_map.h"

namespace {

int attribute_of(int which) {
  switch (which) {
    case 16:
      return 132;
    case 38:
      return 50 << 20;
    case 75:
      return 9;
    case 76:
      return 0;
    case 81:
      return 228 * 1024;
    case 97:
      return 227 * 1024;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

int cuGetErrorName(int result, const char** text) {
  return *text = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER", 0;
}
int cuGetErrorString(int, const char** text) { return *text = "as the test wants it", 0; }
int cuDeviceGetName(char* name, int length, int) {
  return std::strncpy(name, "Fake GPU", static_cast<std::size_t>(length)), 0;
}
int cuDeviceGetAttribute(int* value, int which, int) { return *value = attribute_of(which), 0; }

int cuModuleLoadData(void** module, const void*) {
  FakeCuda& state = *fake_cuda();
  if (state.module_result != 0) return state.module_result;
  ++state.modules;
  return *module = reinterpret_cast<void*>(std::uintptr_t{4096} + static_cast<std::uintptr_t>(state.modules)), 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char*) { return *function = module, 0; }
int cuFuncGetAttribute(int* value, int which, void*) { return *value = which == 4 ? 42 : 0, 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, std::size_t) { return *blocks = 2, 0; }
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  FakeCuda& state = *fake_cuda();
  if (state.launch_result != 0) return state.launch_result;
  ++state.launches;
  FakeLaunch& last = state.last;
  std::memcpy(last.grid.data(), config->grid, sizeof(config->grid));
  std::memcpy(last.block.data(), config->block, sizeof(config->block));
  last.shared_bytes = config->shared_bytes;
  last.stream = config->stream;
  last.function = function;
  last.attributes = config->attribute_count;
  if (state.parameter_bytes > 0) std::memcpy(last.parameters.data(), parameters[0], state.parameter_bytes);
  return 0;
}

int cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int,
                           int swizzle, int, int) {
  FakeCuda& state = *fake_cuda();
  if (const int result = check_tensor_map(map, type, rank, address, sizes, strides, box, swizzle); result != 0)
    return result;
  if (state.map_count < state.maps.size()) {
    FakeMap& kept = state.maps[state.map_count] = {};
    std::copy_n(sizes, rank, kept.sizes.begin());
    std::copy_n(box, rank, kept.box.begin());
  }
  ++state.map_count;
  return std::memset(map, 1, 128), 0;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  ++fake_cuda()->allocations;
  return *address = reinterpret_cast<std::uint64_t>(memory), memory != nullptr ? 0 : 2;
}
int cuMemFree_v2(std::uint64_t address) {
  --fake_cuda()->allocations;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
}
