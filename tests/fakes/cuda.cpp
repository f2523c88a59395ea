// SPDX-License-Identifier: Apache-2.0
// The driver's entry points but those that run kernels and describe the GPU: recorded.cpp beside this file, and
// tests/emulator, which runs kernels.
#include "fakes/cuda.h"

#include <array>
#include <atomic>
#include <cstring>

namespace {

FakeCuda state;
std::array<int, 2> primary{};          // the address of each is a device's context
thread_local void* current = nullptr;  // contexts are the calling thread's
constexpr int kInvalidContext = 201;
constexpr int kInvalidValue = 1;

int device_of(const void* context) { return context == &primary[1] ? 1 : 0; }

}  // namespace

extern "C" {

FakeCuda* fake_cuda() { return &state; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 12090, 0; }
int cuDeviceGetCount(int* count) { return *count = state.devices, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < state.devices ? 0 : kInvalidValue; }
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = std::size_t{80} << 30U, 0; }
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
