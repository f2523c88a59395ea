// SPDX-License-Identifier: Apache-2.0
#include "device/kernel_timing.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>

#include "cases/device_copy.h"
#include "cuda/driver/device.h"
#include "cuda/jit/cache.h"
#include "cuda/jit/kernel.h"
#include "cuda/jit/pack.h"
#include "plan/implementations.h"
#include "tessera/cuda.h"
#include "tessera/executor.h"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kProblem = "attention sq=1024 hq=8 hkv=2 d=128 dtype=bf16 causal";
constexpr int kRuns = 100;  // fewer than a stream queues before its host waits
constexpr int kRepetitions = 101;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

Target target() {
  return cuda::find_driver() != nullptr && !cuda::devices().empty() ? Target::cuda_device(0) : Target::cuda(90);
}

/// Does the work in a child process, whose output comes at once.
void in_child(const std::function<void()>& work) {
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child < 0) throw Error(ErrorCode::internal, "fork", "failure", "a child process");
  if (child == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      fmt::print("{}\n", error.what());
    }
    std::fflush(stdout);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
}

/// One look-up and, on a GPU, the load into a context that is there already, as a first run meets them.
void time_look_up(const char* what) {
  const Target on = target();
  const Plan plan = make_plan(Problem::parse(kProblem), on);
  const cuda::KernelSource& source = plan.state().kernels.front();
  std::optional<cuda::CurrentContext> context;
  if (on.multiprocessors > 0) context.emplace(on.index);
  const auto start = Clock::now();
  const cuda::Found found = cuda::find_or_compile(source, cuda::architecture(on.sm));
  const double look_up = milliseconds_since(start);
  fmt::print("{:<18}{:.2f} ms, from the {}", what, look_up, cuda::to_string(found.origin));
  if (!context) {
    fmt::print("\n");
    return;
  }
  const auto load = Clock::now();
  const cuda::Kernel kernel(source.name, *found.compiled);
  fmt::print(", and {:.2f} ms to load\n", milliseconds_since(load));
}

struct DeviceTensor {
  DeviceTensor(const Target& on, DType dtype, std::initializer_list<std::int64_t> shape)
      : index(on.index), tensor(Tensor::contiguous(nullptr, dtype, shape, {DeviceType::cuda, on.index})) {
    tensor.data = cuda::allocate(index, static_cast<std::size_t>(tensor.numel()) * size_of(dtype));
  }
  ~DeviceTensor() { cuda::release(index, tensor.data); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  int index;
  Tensor tensor;
};

/// The median host time of many repetitions, each on an empty queue.
double microseconds_a_call(const std::function<void()>& call) {
  std::array<double, kRepetitions> taken{};
  for (double& microseconds : taken) {
    cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
    const auto start = Clock::now();
    for (int i = 0; i < kRuns; ++i) call();
    microseconds = milliseconds_since(start) * 1e3 / kRuns;
  }
  cuda::check(cuda::driver().context_synchronize(), "cuCtxSynchronize");
  std::nth_element(taken.begin(), taken.begin() + kRepetitions / 2, taken.end());
  return taken[kRepetitions / 2];
}

void time_runs() {
  const Target on = target();
  const Problem problem = Problem::parse("attention sq=16 hq=1 d=128 dtype=bf16");
  Executor executor(make_plan(problem, on));
  executor.prepare();
  DeviceTensor q(on, DType::bf16, {1, 16, 1, 128}), k(on, DType::bf16, {1, 16, 1, 128}),
      v(on, DType::bf16, {1, 16, 1, 128}), o(on, DType::bf16, {1, 16, 1, 128});
  Bindings bindings;
  bindings[Slot::q] = q.tensor;
  bindings[Slot::k] = k.tensor;
  bindings[Slot::v] = v.tensor;
  bindings[Slot::o] = o.tensor;
  const cuda::CurrentContext context(on.index);
  const cuda::KernelSource nothing{"nothing", "extern \"C\" __global__ void tessera_kernel() {}\n"};
  const cuda::Kernel& empty = cuda::kernel(nothing, on);
  const Stream stream = cases::device_stream(on.index);
  const double run = microseconds_a_call([&] { executor.run(bindings, stream); });
  const double launch = microseconds_a_call([&] { empty.launch({}, {}, 0, stream.handle, nullptr); });
  fmt::print("{:<18}{:.2f} us of host time; a launch of nothing takes {:.2f} us (medians of {} times {} calls)\n",
             "later runs:", run, launch, kRepetitions, kRuns);
}

}  // namespace

void print_kernel_timing() {
  std::string pattern = (std::filesystem::temp_directory_path() / "tessera-timing-XXXXXX").string();
  const char* folder = ::mkdtemp(pattern.data());
  if (folder == nullptr) throw Error(ErrorCode::io, pattern, "a folder that cannot be made", "a temporary folder");
  const std::string cache = folder;
  fmt::print("kernel of {}\n", kProblem);
  // A pack would answer first: the other two are timed without.
  in_child([&] {
    cuda::set_cache_folder(cache);
    cuda::ignore_packs();
    time_look_up("first compile:");
  });
  in_child([&] {
    cuda::set_cache_folder(cache);
    cuda::ignore_packs();
    time_look_up("disk cache:");
  });
  if (cuda::embedded_pack().size() > 0 || cuda::pack_in_use().pack.size() > 0) {
    in_child([] {
      cuda::set_cache_folder("");
      time_look_up("pack:");
    });
  } else {
    fmt::print("{:<18}none\n", "pack:");
  }
  std::error_code ignored;
  std::filesystem::remove_all(cache, ignored);
  in_child([] {
    if (target().multiprocessors > 0) time_runs();
  });
}

}  // namespace tessera::cli
