// SPDX-License-Identifier: Apache-2.0
#include "bench_device.h"

#include <algorithm>

#include "bench_measure.h"
#include "cases/device_copy.h"
#include "cuda/jit/device.h"
#include "cuda/jit/kernel.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kFlushBytes = std::size_t{256} << 20U;  // several times any L2 cache of today
constexpr int kMostEvents = 2 * DeviceRun::kMostCalls;

cuda::StreamHandle handle_of(Stream stream) { return static_cast<cuda::StreamHandle>(stream.handle); }

float milliseconds_between(cuda::EventHandle begin, cuda::EventHandle end) {
  float milliseconds = 0;
  cuda::check(cuda::driver().event_elapsed(&milliseconds, begin, end), "cuEventElapsedTime");
  return milliseconds;
}

}  // namespace

DeviceRun::DeviceRun(Executor& executor, const Arrays& arrays)
    : executor_(executor),
      device_(executor.plan().target().index),
      stream_(cases::device_stream(device_)),
      bindings_(bindings_of(arrays)) {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  try {
    for (const auto& [slot, array] : arrays) {
      Tensor& tensor = bindings_[slot];
      memory_.push_back(cuda::allocate(device_, std::max<std::size_t>(array.size_bytes(), 16)));
      tensor.data = memory_.back();
      tensor.device = {DeviceType::cuda, device_};
      if (array.size_bytes() == 0) continue;
      cuda::check(d.copy_to_device(cuda::address(tensor.data), array.data(), array.size_bytes()), "cuMemcpyHtoD");
    }
    flush_ = cuda::allocate(device_, kFlushBytes);
    memory_.push_back(flush_);
    for (int i = 0; i < kMostEvents; ++i) {
      cuda::EventHandle event = nullptr;
      cuda::check(d.event_create(&event, 0), "cuEventCreate");
      events_.push_back(event);
    }
  } catch (...) {
    release();
    throw;
  }
}

DeviceRun::~DeviceRun() { release(); }

void DeviceRun::release() noexcept {
  for (cuda::EventHandle event : events_) cuda::driver().event_destroy(event);
  for (void* memory : memory_) cuda::release(device_, memory);
}

double DeviceRun::time(int calls, int warm_up) {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  const cuda::StreamHandle stream = handle_of(stream_);
  calls = std::clamp(calls, 1, kMostCalls);
  for (int i = 0; i < warm_up; ++i) executor_.run(bindings_, stream_);
  for (int i = 0; i < calls; ++i) {
    const auto at = static_cast<std::size_t>(2 * i);
    cuda::check(d.fill_bytes(cuda::address(flush_), static_cast<unsigned char>(i), kFlushBytes, stream), "cuMemsetD8");
    cuda::check(d.event_record(events_[at], stream), "cuEventRecord");
    executor_.run(bindings_, stream_);
    cuda::check(d.event_record(events_[at + 1], stream), "cuEventRecord");
  }
  cuda::check(d.stream_synchronize(stream), "cuStreamSynchronize");
  std::vector<double> us;
  for (int i = 0; i < calls; ++i) {
    const auto at = static_cast<std::size_t>(2 * i);
    us.push_back(milliseconds_between(events_[at], events_[at + 1]) * 1e3);
  }
  return quantile(us, 0.5);
}

}  // namespace tessera::cli
