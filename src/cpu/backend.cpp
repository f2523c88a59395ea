// SPDX-License-Identifier: Apache-2.0
// The CPU as plans and executors see it: threads, instruction sets, and a run that can be interrupted.
#include "cpu/backend.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <new>

#include "cpu/implementations.h"
#include "cpu/simd/kernels.h"
#include "tessera/error.h"

namespace tessera::cpu {
namespace {

constexpr int kMostThreads = 4096;
constexpr std::align_val_t kAlignment{64};  // a cache line and an AVX-512 vector

int threads_of(const Target& target) {
  if (target.threads < 0 || target.threads > kMostThreads) {
    throw Error(ErrorCode::invalid_argument, "threads", std::to_string(target.threads),
                "0 (as many as OpenMP would use) to " + std::to_string(kMostThreads));
  }
  if (target.threads > 0) return target.threads;
#ifdef _OPENMP
  return std::clamp(omp_get_max_threads(), 1, kMostThreads);
#else
  return 1;
#endif
}

std::string isa_of(const Target& target) {
  const std::vector<std::string> isas = usable_isas();
  if (target.isa.empty()) return isas.empty() ? "scalar" : isas.front();
  const std::vector<std::string> emulated = emulated_isas();  // used only if named
  const auto has = [&](const auto& list) { return std::find(list.begin(), list.end(), target.isa) != list.end(); };
  if (has(isas) || has(emulated)) return target.isa;
  std::string want = "one that this build has and this machine can run:";
  for (const std::string& isa : isas) want += " " + isa;
  throw Error(ErrorCode::unsupported, "isa", target.isa, want);
}

class CpuBackend final : public detail::Backend {
 public:
  [[nodiscard]] const char* name() const noexcept override { return "the CPU"; }
  [[nodiscard]] Target device(int /*index*/) const override { return Target::cpu(); }
  [[nodiscard]] std::vector<std::string> isas() const override { return usable_isas(); }

  [[nodiscard]] Target resolve(const Target& target) const override {
    Target resolved = target;
    resolved.threads = threads_of(target);
    resolved.isa = isa_of(target);
    return resolved;
  }

  [[nodiscard]] Support supports(const Wishes& wishes) const override {
    if (!wishes.stages && !wishes.warps && wishes.loader.empty()) return Support::yes();
    return Support::no("stages, warps and loader are wishes for cuda");
  }

  void plan(detail::PlanState& state) const override { state.implementation->plan(state); }

  [[nodiscard]] std::unique_ptr<detail::DeviceState> open(const detail::PlanState& /*state*/) const override {
    return nullptr;
  }

  [[nodiscard]] void* allocate(const Target& /*target*/, std::size_t bytes) const override {
    return ::operator new(bytes, kAlignment);
  }

  void release(const Target& /*target*/, void* memory) const noexcept override {
    ::operator delete(memory, kAlignment);
  }

  void prepare(const detail::PlanState& /*state*/, detail::DeviceState* /*kept*/) const override {}

  void run(const detail::PlanState& state, detail::DeviceState* /*kept*/, const Bindings& bindings,
           std::byte* workspace, Stream /*stream*/) const override {
    detail::Workers workers(state.target.threads, bindings.interrupt);
    static_cast<const Implementation&>(*state.implementation).run(state, bindings, {workspace, workers});
    workers.throw_if_stopped();
  }
};

constexpr CpuBackend kBackend;

}  // namespace

const detail::Backend& backend() noexcept { return kBackend; }

}  // namespace tessera::cpu
