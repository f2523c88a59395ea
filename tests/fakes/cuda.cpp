// SPDX-License-Identifier: Apache-2.0
#include "fakes/cuda.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

FakeCuda state;
std::array<int, 2> primary{};          // the address of each is a device's context
thread_local void* current = nullptr;  // contexts are the calling thread's
constexpr int kInvalidContext = 201;
constexpr int kInvalidValue = 1;

struct LaunchConfig {
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t shared_bytes;
  void* stream;
  void* attributes;
  std::uint32_t attribute_count;
};

int device_of(const void* context) { return context == &primary[1] ? 1 : 0; }

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

FakeCuda* fake_cuda() { return &state; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 12090, 0; }
int cuGetErrorName(int result, const char** text) {
  return *text = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER", 0;
}
int cuGetErrorString(int, const char** text) { return *text = "as the test wants it", 0; }

int cuDeviceGetCount(int* count) { return *count = state.devices, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < state.devices ? 0 : kInvalidValue; }
int cuDeviceGetName(char* name, int length, int) {
  return std::strncpy(name, "Fake GPU", static_cast<std::size_t>(length)), 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = std::size_t{80} << 30U, 0; }
int cuDeviceGetAttribute(int* value, int which, int) { return *value = attribute_of(which), 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = &primary[static_cast<std::size_t>(device)], 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(void* context) { return current = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = nullptr, 0; }
int cuCtxGetDevice(int* device) { return *device = device_of(current), current != nullptr ? 0 : kInvalidContext; }
int cuCtxGetId(void* context, unsigned long long* id) {
  return *id = state.context_id + 1000000U * static_cast<unsigned>(device_of(context)), 0;
}
int cuCtxSynchronize() { return 0; }

int cuModuleLoadData(void** module, const void*) {
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

// Refuses what the driver's documentation does.
int cuTensorMapEncodeTiled(void* map, int, std::uint32_t rank, void* address, const std::uint64_t* sizes,
                           const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t*, int,
                           int swizzle, int, int) {
  if (rank != 4 || address == nullptr || reinterpret_cast<std::uintptr_t>(address) % 16 != 0) return kInvalidValue;
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) return kInvalidValue;
  for (std::uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256) return kInvalidValue;
    constexpr std::uint64_t kMostStride = std::uint64_t{1} << 40;
    const std::uint64_t stride = i > 0 ? strides[i - 1] : 16;
    if (stride == 0 || stride % 16 != 0 || stride >= kMostStride) return kInvalidValue;
  }
  if (box[0] * 2 > (swizzle == 3 ? 128U : 64U)) return kInvalidValue;
  if (state.map_count < state.maps.size()) {
    state.maps[state.map_count] = {{sizes[0], sizes[1], sizes[2], sizes[3]}, {box[0], box[1], box[2], box[3]}};
  }
  ++state.map_count;
  return std::memset(map, 1, 128), 0;
}

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  ++state.allocations;
  return *address = reinterpret_cast<std::uint64_t>(memory), memory != nullptr ? 0 : 2;
}
int cuMemFree_v2(std::uint64_t address) {
  --state.allocations;
  std::free(reinterpret_cast<void*>(address));
  return 0;
}
int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), 0;
}
int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t bytes) {
  return std::memcpy(to, reinterpret_cast<const void*>(from), bytes), 0;
}
int cuMemsetD8Async(std::uint64_t to, unsigned char value, std::size_t bytes, void*) {
  return std::memset(reinterpret_cast<void*>(to), value, bytes), 0;
}

int cuStreamCreate(void** stream, unsigned) { return *stream = &state, 0; }
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) { return ++state.synchronisations, 0; }
int cuStreamIsCapturing(void*, int* status) { return *status = state.capture, state.capture_result; }
int cuStreamGetId(void* stream, unsigned long long* id) {
  static std::atomic<unsigned long long> threads{0};
  thread_local const unsigned long long thread = ++threads;
  const auto handle = reinterpret_cast<std::uintptr_t>(stream);
  *id = (state.streams * 1000 + handle) * 1000 + (handle == 2 ? thread : 0);  // 2: the thread's default stream
  return state.stream_id_result;
}
int cuStreamBeginCapture_v2(void*, int) { return state.capture = 1, 0; }
int cuStreamEndCapture(void*, void** graph) { return state.capture = 0, *graph = &state, 0; }
int cuGraphInstantiateWithFlags(void** exec, void*, unsigned long long) { return *exec = &state, 0; }
int cuGraphLaunch(void*, void*) { return 0; }
int cuGraphExecDestroy(void*) { return 0; }
int cuGraphDestroy(void*) { return 0; }
int cuEventCreate(void** event, unsigned) { return *event = &state, 0; }
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, 0; }
}
