// SPDX-License-Identifier: Apache-2.0
// The CUDA backend of plans and executors: contexts, kernels that are loaded once, and the check of metadata.
#include "cuda/backend.h"

#include "cuda/driver/device.h"
#include "cuda/implementations.h"
#include "cuda/jit/kernel.h"
#include "cuda/metadata/metadata_check.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

struct LoadedKernels final : detail::DeviceState {
  KernelSet set;
};

/// Whether the last of the plan's kernels checks metadata. It runs before the others, which clamp.
bool reports_metadata(const detail::PlanState& state) noexcept { return state.problem.metadata == Metadata::report; }

class CudaBackend final : public detail::Backend {
 public:
  [[nodiscard]] const char* name() const noexcept override { return "CUDA"; }

  [[nodiscard]] Target device(int index) const override {
    const Device& present = cuda::device(index < 0 ? current_device() : index);
    Target target;
    target.device = DeviceType::cuda;
    target.sm = present.sm;
    target.shared_memory = present.shared_memory;
    target.multiprocessors = present.multiprocessors;
    target.index = present.index;
    return target;
  }

  [[nodiscard]] std::vector<std::string> isas() const override { return {}; }
  [[nodiscard]] Target resolve(const Target& target) const override { return target; }
  [[nodiscard]] Support supports(const Wishes& /*wishes*/) const override { return Support::yes(); }

  void plan(detail::PlanState& state) const override {
    state.implementation->plan(state);
    if (reports_metadata(state)) state.kernels.push_back(metadata_check_source());
  }

  [[nodiscard]] std::unique_ptr<detail::DeviceState> open(const detail::PlanState& state) const override {
    const Target& target = state.target;
    const int present = cuda::device(target.index).sm;
    if (target.emulated || target.sm == present) return std::make_unique<LoadedKernels>();
    throw Error(ErrorCode::unsupported, "target", target.to_string(),
                "sm_" + std::to_string(present) + ", the device that is there, or Target::emulate");
  }

  [[nodiscard]] void* allocate(const Target& target, std::size_t bytes) const override {
    return cuda::allocate(target.index, bytes);
  }

  void release(const Target& target, void* memory) const noexcept override { cuda::release(target.index, memory); }

  void prepare(const detail::PlanState& state, detail::DeviceState* kept) const override {
    if (state.kernels.empty()) return;
    const CurrentContext context(state.target.index);
    static_cast<LoadedKernels*>(kept)->set.load(state.kernels, state.target);
  }

  void run(const detail::PlanState& state, detail::DeviceState* kept, const Bindings& bindings, std::byte* workspace,
           Stream stream) const override {
    const CurrentContext context(state.target.index);
    Resources resources{workspace, stream,
                        static_cast<LoadedKernels*>(kept)->set.load(state.kernels, state.target, stream)};
    if (reports_metadata(state)) {
      launch_metadata_check(state.problem, bindings, *resources.kernels.back(), stream);
      resources.kernels = resources.kernels.first(resources.kernels.size() - 1);
    }
    static_cast<const Implementation&>(*state.implementation).run(state, bindings, resources);
  }
};

constexpr CudaBackend kBackend;

}  // namespace

const detail::Backend& backend() noexcept { return kBackend; }

}  // namespace tessera::cuda
