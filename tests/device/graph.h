// SPDX-License-Identifier: Apache-2.0
// Work recorded once and launched many times: a CUDA graph; on the CPU the work itself.
#pragma once

#include <functional>
#include <utility>

#include "cases/device_copy.h"
#include "cuda/driver/device.h"
#include "cuda/driver/driver.h"
#include "tessera/executor.h"

namespace tessera::test {

/// A capture of the test's stream. The mode is the strictest: a call that allocates, loads or waits, on any thread,
/// invalidates it.
class Capture {
 public:
  explicit Capture(int device) : context_(device), stream_(cases::device_stream(device)) {
    constexpr int kGlobal = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
    cuda::check(cuda::driver().capture_begin(handle(), kGlobal), "cuStreamBeginCapture");
  }
  ~Capture() {
    if (ended_) return;
    cuda::GraphHandle graph = nullptr;
    cuda::driver().capture_end(handle(), &graph);
    if (graph != nullptr) cuda::driver().graph_destroy(graph);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  [[nodiscard]] Stream stream() const { return stream_; }
  [[nodiscard]] bool is_active() const {
    cuda::CaptureStatus status = cuda::CaptureStatus::none;
    cuda::check(cuda::driver().stream_capture_status(handle(), &status), "cuStreamIsCapturing");
    return status == cuda::CaptureStatus::active;
  }
  [[nodiscard]] cuda::GraphExecHandle end() {
    ended_ = true;
    cuda::GraphHandle graph = nullptr;
    cuda::check(cuda::driver().capture_end(handle(), &graph), "cuStreamEndCapture");
    cuda::GraphExecHandle ready = nullptr;
    const cuda::Result result = cuda::driver().graph_instantiate(&ready, graph, 0);
    cuda::driver().graph_destroy(graph);
    cuda::check(result, "cuGraphInstantiate");
    return ready;
  }

 private:
  [[nodiscard]] cuda::StreamHandle handle() const { return static_cast<cuda::StreamHandle>(stream_.handle); }

  cuda::CurrentContext context_;
  Stream stream_;
  bool ended_ = false;
};

class Graph {
 public:
  /// Records what `work` puts on the stream that it is given.
  Graph(const Target& target, std::function<void(Stream)> work) : device_(target.index), work_(std::move(work)) {
    if (target.device == DeviceType::cpu) return;
    Capture capture(device_);
    work_(capture.stream());
    ready_ = capture.end();
    work_ = nullptr;
  }
  ~Graph() {
    if (ready_ == nullptr) return;
    const cuda::CurrentContext context(device_);
    cuda::driver().graph_exec_destroy(ready_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Waits for the end.
  void launch() {
    if (ready_ == nullptr) return work_({});
    const cuda::CurrentContext context(device_);
    const Stream stream = cases::device_stream(device_);
    cuda::check(cuda::driver().graph_launch(ready_, static_cast<cuda::StreamHandle>(stream.handle)), "cuGraphLaunch");
    cases::wait_for(stream);
  }

 private:
  int device_;
  std::function<void(Stream)> work_;
  cuda::GraphExecHandle ready_ = nullptr;
};

}  // namespace tessera::test
