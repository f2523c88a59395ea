// SPDX-License-Identifier: Apache-2.0
#include "tessera/executor.h"

#include <new>
#include <utility>

#include "base/parallel.h"
#include "bindings/validate.h"
#include "cuda/driver/device.h"
#include "cuda/jit/kernel.h"
#include "cuda/metadata/metadata_check.h"
#include "plan/implementations.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kWorkspaceAlignment = 64;  // a cache line and an AVX-512 vector

bool is_on_gpu(const Plan& plan) noexcept { return plan.target().device == DeviceType::cuda; }

/// A plan may be made for a chip that is not there; an executor may not. nullptr on the CPU.
std::unique_ptr<cuda::KernelSet> kernels_on_device(const Plan& plan) {
  if (!is_on_gpu(plan)) return nullptr;
  const Target& target = plan.target();
  const int present = cuda::device(target.index).sm;
  if (target.emulated || target.sm == present) return std::make_unique<cuda::KernelSet>();
  throw Error(ErrorCode::unsupported, "target", target.to_string(),
              "sm_" + std::to_string(present) + ", the device that is there, or Target::emulate");
}

}  // namespace

Executor::Executor(Plan plan)
    : plan_(std::move(plan)), bytes_(plan_.workspace_bytes()), kernels_(kernels_on_device(plan_)) {
  if (bytes_ == 0) return;
  workspace_ = is_on_gpu(plan_) ? cuda::allocate(plan_.target().index, bytes_)
                                : ::operator new(bytes_, std::align_val_t{kWorkspaceAlignment});
  owned_ = true;
}

Executor::Executor(Plan plan, void* workspace, std::size_t bytes)
    : plan_(std::move(plan)), workspace_(workspace), bytes_(bytes), kernels_(kernels_on_device(plan_)) {
  const std::size_t need = plan_.workspace_bytes();
  if (bytes < need || (workspace == nullptr && need > 0)) {
    throw Error(ErrorCode::invalid_argument, "workspace",
                workspace == nullptr ? "nullptr" : std::to_string(bytes) + " bytes", std::to_string(need) + " bytes");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    throw Error(ErrorCode::invalid_argument, "workspace", "a misaligned address", "a multiple of 64 bytes");
  }
}

Executor::~Executor() {
  if (!owned_) return;
  if (is_on_gpu(plan_)) {
    cuda::release(plan_.target().index, workspace_);
  } else {
    ::operator delete(workspace_, std::align_val_t{kWorkspaceAlignment});
  }
}

// The moved-from plan stays shared: Plan has no empty state, and a copy of it is a reference count.
Executor::Executor(Executor&& other) noexcept
    : plan_(other.plan_),
      workspace_(std::exchange(other.workspace_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      owned_(std::exchange(other.owned_, false)),
      kernels_(std::move(other.kernels_)) {}

Executor& Executor::operator=(Executor&& other) noexcept {
  std::swap(plan_, other.plan_);
  std::swap(workspace_, other.workspace_);
  std::swap(bytes_, other.bytes_);
  std::swap(owned_, other.owned_);
  std::swap(kernels_, other.kernels_);
  return *this;
}

void Executor::run(const Bindings& bindings, Stream stream) {
  const detail::PlanState& state = plan_.state();
  if (bytes_ < state.workspace_bytes || (is_on_gpu(plan_) && !kernels_)) {
    throw Error(ErrorCode::invalid_argument, "executor", "one that was moved from", "an executor with its workspace");
  }
  const Target& target = state.target;
  detail::Resources resources{static_cast<std::byte*>(workspace_), stream, {}, nullptr};
  if (target.device == DeviceType::cpu) {
    const detail::HostCallables host(state.callables, bindings);
    detail::validate(state.problem, state.rules, host.bindings(), {target.device, target.index});
    detail::Workers workers(target.threads, bindings.interrupt);
    resources.workers = &workers;
    state.implementation->run(state, host.bindings(), resources);
    return workers.throw_if_stopped();
  }
  detail::validate(state.problem, state.rules, bindings, {target.device, target.index});
  const cuda::CurrentContext context(target.index);
  resources.kernels = kernels_->load(state.kernels, target, stream);
  if (detail::reports_metadata(state)) {
    cuda::launch_metadata_check(state.problem, bindings, *resources.kernels.back(), stream);
    resources.kernels = resources.kernels.first(resources.kernels.size() - 1);
  }
  state.implementation->run(state, bindings, resources);
}

void Executor::prepare() {
  const detail::PlanState& state = plan_.state();
  if (state.kernels.empty() || !kernels_) return;
  const cuda::CurrentContext context(state.target.index);
  kernels_->load(state.kernels, state.target);
}

}  // namespace tessera
