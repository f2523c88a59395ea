// SPDX-License-Identifier: Apache-2.0
#include "bench/device.h"

#include <algorithm>
#include <utility>

#include "bench/measure.h"
#include "cases/device_copy.h"
#include "cuda/driver/device.h"
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

DeviceRun::DeviceRun(Executor& executor, const BenchInputs& inputs, bool as_graph)
    : executor_(executor),
      as_graph_(as_graph || !inputs.slots_by_call.empty()),
      device_(executor.plan().target().index),
      stream_(cases::device_stream(device_)),
      bindings_(bindings_of(inputs.arrays)) {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  try {
    for (const auto& [slot, array] : inputs.arrays) {
      bindings_[slot].data = copy_of(array);
      bindings_[slot].device = {DeviceType::cuda, device_};
    }
    for (const files::Array& slots : inputs.slots_by_call) slots_by_call_.push_back(copy_of(slots));
    for (const files::Array& cursors : inputs.cursors) cursors_.push_back(copy_of(cursors));
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

void* DeviceRun::copy_of(const files::Array& array) {
  memory_.push_back(cuda::allocate(device_, std::max<std::size_t>(array.size_bytes(), 16)));
  if (array.size_bytes() > 0) {
    cuda::check(cuda::driver().copy_to_device(cuda::address(memory_.back()), array.data(), array.size_bytes()),
                "cuMemcpyHtoD");
  }
  return memory_.back();
}

void DeviceRun::fetch(Slot slot, const files::Array& to) const {
  const cuda::CurrentContext context(device_);
  cuda::check(cuda::driver().copy_from_device(to.data(), cuda::address(bindings_[slot].data), to.size_bytes()),
              "cuMemcpyDtoH");
}

void DeviceRun::release() noexcept {
  const auto destroy = [](const Recorded& recorded) {
    if (recorded.graph != nullptr) cuda::driver().graph_exec_destroy(recorded.graph);
  };
  destroy(steps_);
  for (const Recorded& recorded : recorded_passes_) destroy(recorded);
  for (cuda::EventHandle event : events_) cuda::driver().event_destroy(event);
  for (void* memory : memory_) cuda::release(device_, memory);
}

template <class Call>
double DeviceRun::time_graph(Recorded& recorded, int calls, int warm_up, const Call& call) {
  constexpr int kOfThisThread = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  const cuda::Driver& d = cuda::driver();
  const cuda::StreamHandle stream = handle_of(stream_);
  if (recorded.calls != calls) {
    if (recorded.graph != nullptr) d.graph_exec_destroy(std::exchange(recorded.graph, nullptr));
    cuda::check(d.capture_begin(stream, kOfThisThread), "cuStreamBeginCapture");
    for (int i = 0; i < calls; ++i) call(static_cast<std::size_t>(i) % std::max<std::size_t>(slots_by_call_.size(), 1));
    cuda::GraphHandle graph = nullptr;
    cuda::check(d.capture_end(stream, &graph), "cuStreamEndCapture");
    const cuda::Result result = d.graph_instantiate(&recorded.graph, graph, 0);
    d.graph_destroy(graph);
    cuda::check(result, "cuGraphInstantiate");
    recorded.calls = calls;
  }
  for (int i = 0; i < warm_up; ++i) cuda::check(d.graph_launch(recorded.graph, stream), "cuGraphLaunch");
  cuda::check(d.event_record(events_[0], stream), "cuEventRecord");
  cuda::check(d.graph_launch(recorded.graph, stream), "cuGraphLaunch");
  cuda::check(d.event_record(events_[1], stream), "cuEventRecord");
  cuda::check(d.stream_synchronize(stream), "cuStreamSynchronize");
  return milliseconds_between(events_[0], events_[1]) * 1e3 / calls;
}

double DeviceRun::time_in_place(int calls, int warm_up) {
  if (slots_by_call_.empty()) return 0;
  const cuda::CurrentContext context(device_);
  calls = std::clamp(calls, 1, kMostCalls);
  if (passes_.empty()) {
    for (const InPlaceWay& way : in_place_ways()) {
      passes_.emplace_back(way.threads, way.loads, executor_.plan().target(), stream_);
    }
    recorded_passes_.resize(passes_.size());
  }
  const Problem& problem = executor_.plan().problem();
  const Tensor& state = bindings_[Slot::state];
  const std::size_t bytes =
      static_cast<std::size_t>(state.numel() / problem.linear.states * problem.batch) * size_of(state.dtype);
  double best = 0;
  for (std::size_t way = 0; way < passes_.size(); ++way) {
    if (!passes_[way].fits(bytes)) continue;
    const double us = time_graph(recorded_passes_[way], calls, warm_up, [&](std::size_t call) {
      passes_[way].launch(state.bytes() + call * bytes, bytes, stream_);
    });
    best = best == 0 ? us : std::min(best, us);
  }
  return best;
}

double DeviceRun::time(int calls, int warm_up) {
  const cuda::CurrentContext context(device_);
  const cuda::Driver& d = cuda::driver();
  const cuda::StreamHandle stream = handle_of(stream_);
  calls = std::clamp(calls, 1, kMostCalls);
  if (as_graph_) {
    return time_graph(steps_, calls, warm_up, [&](std::size_t call) {
      if (!slots_by_call_.empty()) bindings_[Slot::state_slots].data = slots_by_call_[call];
      if (!cursors_.empty()) bindings_[Slot::ring_cursor].data = cursors_[call];
      executor_.run(bindings_, stream_);
    });
  }
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
