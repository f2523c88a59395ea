// SPDX-License-Identifier: Apache-2.0
#include "cuda/jit/kernel.h"

#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "cuda/driver/device.h"
#include "cuda/jit/cache.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

constexpr Result kCaptureErrors = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and the eight after it
constexpr Result kCaptureErrorsEnd = 909;

[[noreturn]] void refuse_capture(const std::string& name) {
  throw Error(ErrorCode::invalid_argument, "stream",
              "a stream under graph capture, and kernel " + name + " is not loaded yet",
              "a warm-up before the capture: Executor::prepare(), or one run");
}

struct Name {
  unsigned long long context;
  std::string_view text;
  bool operator==(const Name&) const = default;
};
struct OwnedName {
  unsigned long long context;
  std::string text;
};
struct NameHash {
  using is_transparent = void;
  std::size_t operator()(const Name& name) const noexcept {
    return std::hash<std::string_view>()(name.text) ^ (name.context * 0x9E3779B97F4A7C15ULL);
  }
  std::size_t operator()(const OwnedName& name) const noexcept { return (*this)(Name{name.context, name.text}); }
};
struct NameEqual {
  using is_transparent = void;
  static Name view(const OwnedName& name) noexcept { return {name.context, name.text}; }
  bool operator()(const OwnedName& a, const OwnedName& b) const noexcept { return view(a) == view(b); }
  bool operator()(const OwnedName& a, const Name& b) const noexcept { return view(a) == b; }
  bool operator()(const Name& a, const OwnedName& b) const noexcept { return a == view(b); }
};

struct Loaded {
  std::shared_mutex mutex;
  std::unordered_map<OwnedName, std::unique_ptr<const Kernel>, NameHash, NameEqual> kernels;
};
Loaded& loaded() {
  static Loaded held;
  return held;
}

/// The id of the current context. Ids are never reused, unlike the addresses of destroyed contexts.
unsigned long long current_context(const Driver& d) {
  ContextHandle context = nullptr;
  check(d.context_current(&context), "cuCtxGetCurrent");
  if (context == nullptr)
    throw Error(ErrorCode::internal, "context", "none on this thread", "CurrentContext around it");
  unsigned long long id = 0;
  check(d.context_id(context, &id), "cuCtxGetId");
  return id;
}

}  // namespace

Kernel::Kernel(std::string name, const Compiled& compiled) : name_(std::move(name)) {
  const Driver& d = driver();
  ModuleHandle module = nullptr;
  const Result result = d.module_load(&module, compiled.cubin.data());
  if (result >= kCaptureErrors && result < kCaptureErrorsEnd) refuse_capture(name_);
  if (result != kSuccess) {
    const int version = driver_version_or_zero();
    throw Error(ErrorCode::internal, "kernel " + name_,
                describe(result) + " from a driver for CUDA " + std::to_string(version / 1000) + "." +
                    std::to_string(version % 1000 / 10) + ", code of NVRTC " + compiled.compiler,
                "code that the driver loads");
  }
  check(d.module_function(&function_, module, kKernelEntry), "cuModuleGetFunction");
  check(d.function_attribute(&registers_, FunctionAttribute::registers, function_), "cuFuncGetAttribute");
  check(d.function_attribute(&local_bytes_, FunctionAttribute::local_bytes, function_), "cuFuncGetAttribute");
  int fixed = 0;
  check(d.function_attribute(&fixed, FunctionAttribute::shared_bytes, function_), "cuFuncGetAttribute");
  // The attribute is only a limit; occupancy depends on what a launch requests. So it is set to the maximum, once.
  const auto most = static_cast<int>(device(current_device()).shared_memory) - fixed;
  check(d.set_function_attribute(function_, FunctionAttribute::dynamic_shared_bytes, most), "cuFuncSetAttribute");
  constexpr int kCapturesEarly = 12030;  // the first driver that can capture such launches into a graph
  can_begin_early_ = device(current_device()).sm >= 90 && driver_version_or_zero() >= kCapturesEarly;
}

void Kernel::launch(Dim3 grid, Dim3 block, std::size_t shared_bytes, void* stream, void** parameters,
                    Begins begins) const {
  LaunchConfig config;
  config.grid = {grid.x, grid.y, grid.z};
  config.block = {block.x, block.y, block.z};
  config.shared_bytes = static_cast<std::uint32_t>(shared_bytes);
  config.stream = static_cast<StreamHandle>(stream);
  LaunchAttribute attribute{LaunchAttributeId::programmatic_serialization, 0, {}};
  if (begins == Begins::early && can_begin_early_) {
    attribute.value.programmatic_serialization = 1;
    config.attributes = &attribute;
    config.attribute_count = 1;
  }
  const Result result = driver().launch(&config, function_, parameters, nullptr);
  if (result != kSuccess) {
    throw Error(ErrorCode::internal, "kernel " + name_, describe(result), "a launch that the driver accepts");
  }
}

int Kernel::blocks_per_multiprocessor(int threads, std::size_t shared_bytes) const {
  int blocks = 0;
  check(driver().occupancy(&blocks, function_, threads, shared_bytes), "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

const Kernel& kernel(const KernelSource& source, const Target& target, Stream stream) {
  const Driver& d = driver();
  const Name name{current_context(d), source.text};
  Loaded& held = loaded();
  {
    const std::shared_lock lock(held.mutex);
    if (const auto at = held.kernels.find(name); at != held.kernels.end()) return *at->second;
  }
  if (is_capturing(stream.handle)) refuse_capture(source.name);
  const int sm = target.emulated || target.sm == 0 ? device(current_device()).sm : target.sm;
  const Found found = find_or_compile(source, architecture(sm));
  auto fresh = std::make_unique<const Kernel>(source.name, *found.compiled);
  const std::unique_lock lock(held.mutex);
  // Another thread may have loaded the kernel meanwhile. Then its copy is used, and ours stays in the context unused.
  const auto [at, _] = held.kernels.try_emplace(OwnedName{name.context, source.text}, std::move(fresh));
  return *at->second;
}

std::span<const Kernel* const> KernelSet::load(std::span<const KernelSource> sources, const Target& target,
                                               Stream stream) {
  if (sources.empty()) return {};
  const unsigned long long context = current_context(driver());
  if (context_ == context) return kernels_;
  context_.reset();
  kernels_.clear();
  for (const KernelSource& source : sources) kernels_.push_back(&kernel(source, target, stream));
  context_ = context;
  return kernels_;
}

}  // namespace tessera::cuda
