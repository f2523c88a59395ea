// SPDX-License-Identifier: Apache-2.0
#include "cuda/driver/device.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <new>

#include "tessera/error.h"

namespace tessera::cuda {
namespace {

constexpr Result kOutOfMemory = 2;

int attribute(const Driver& d, DeviceAttribute which, DeviceHandle handle) {
  int value = 0;
  check(d.device_attribute(&value, which, handle), "cuDeviceGetAttribute");
  return value;
}

Device read_device(const Driver& d, int index) {
  DeviceHandle handle = 0;
  check(d.device(&handle, index), "cuDeviceGet");
  Device device;
  device.index = index;
  std::array<char, 256> name{};
  check(d.device_name(name.data(), static_cast<int>(name.size()) - 1, handle), "cuDeviceGetName");
  device.name = name.data();
  std::size_t memory = 0;
  check(d.device_memory(&memory, handle), "cuDeviceTotalMem");
  device.memory = static_cast<std::int64_t>(memory);
  device.sm = attribute(d, DeviceAttribute::major, handle) * 10 + attribute(d, DeviceAttribute::minor, handle);
  device.multiprocessors = attribute(d, DeviceAttribute::multiprocessors, handle);
  device.shared_memory = attribute(d, DeviceAttribute::shared_memory_opt_in, handle);
  device.shared_memory_multiprocessor = attribute(d, DeviceAttribute::shared_memory_multiprocessor, handle);
  device.l2 = attribute(d, DeviceAttribute::l2_bytes, handle);
  return device;
}

std::vector<Device> read_devices() {
  const Driver& d = driver();
  int count = 0;
  check(d.device_count(&count), "cuDeviceGetCount");
  std::vector<Device> devices;
  for (int index = 0; index < count; ++index) devices.push_back(read_device(d, index));
  return devices;
}

const std::vector<Device>& known_devices() {
  static const std::vector<Device> devices = read_devices();
  return devices;
}

/// The context is retained once and never released: to release the last reference would destroy what others have in it.
ContextHandle primary_context(int index) {
  static std::mutex mutex;
  static std::vector<ContextHandle> contexts;
  device(index);  // checks
  const std::lock_guard lock(mutex);
  const auto at = static_cast<std::size_t>(index);
  if (contexts.size() <= at) contexts.resize(at + 1, nullptr);
  if (contexts[at] == nullptr) {
    DeviceHandle handle = 0;
    check(driver().device(&handle, index), "cuDeviceGet");
    check(driver().primary_context_retain(&contexts[at], handle), "cuDevicePrimaryCtxRetain");
  }
  return contexts[at];
}

// The device of the thread's current context, −1 without one. A device's handle and index are the same number. The
// context is tested first, because tools that watch the driver report the error of cuCtxGetDevice without a context.
DeviceHandle device_of_context(const Driver& d) {
  ContextHandle context = nullptr;
  if (d.context_current(&context) != kSuccess || context == nullptr) return -1;
  DeviceHandle handle = -1;
  return d.context_device(&handle) == kSuccess ? handle : -1;
}

}  // namespace

std::vector<Device> devices() { return known_devices(); }

const Device& device(int index) {
  const std::vector<Device>& devices = known_devices();
  if (index < 0 || static_cast<std::size_t>(index) >= devices.size()) {
    throw Error(ErrorCode::invalid_argument, "device", "cuda:" + std::to_string(index),
                "cuda:0 to below " + std::to_string(devices.size()) + ", the devices that the driver shows");
  }
  return devices[static_cast<std::size_t>(index)];
}

int current_device() { return std::max(device_of_context(driver()), 0); }

CurrentContext::CurrentContext(int index) {
  const Driver& d = driver();
  if (device_of_context(d) == index) return;
  check(d.context_push(primary_context(index)), "cuCtxPushCurrent");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  ContextHandle popped = nullptr;
  if (pushed_) driver().context_pop(&popped);
}

bool is_capturing(void* stream) {
  CaptureStatus status = CaptureStatus::none;
  const Result result = driver().stream_capture_status(static_cast<StreamHandle>(stream), &status);
  return result != kSuccess || status != CaptureStatus::none;
}

std::optional<std::uint64_t> stream_id(void* stream) {
  unsigned long long id = 0;
  const auto ask = driver().stream_id;
  if (ask == nullptr || ask(static_cast<StreamHandle>(stream), &id) != kSuccess) return std::nullopt;
  return id;
}

void* allocate(int index, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const CurrentContext context(index);
  DevicePointer pointer = 0;
  const Result result = driver().allocate(&pointer, bytes);
  if (result == kOutOfMemory) throw std::bad_alloc();
  check(result, "cuMemAlloc");
  return reinterpret_cast<void*>(pointer);
}

void release(int index, void* memory) noexcept {
  if (memory == nullptr) return;
  try {
    const CurrentContext context(index);
    driver().free(address(memory));
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace tessera::cuda
