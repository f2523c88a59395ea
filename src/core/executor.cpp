// SPDX-License-Identifier: Apache-2.0
#include "tessera/executor.h"

#include <new>
#include <utility>

#include "core/implementations.h"
#include "core/validate.h"
#include "cuda/jit/device.h"
#include "cuda/jit/kernel.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kWorkspaceAlignment = 64;  // a cache line and an AVX-512 vector

bool is_on_gpu(const Plan& plan) noexcept { return plan.target().device == DeviceType::cuda; }

/// A plan may be made for a chip that is not there; an executor may not.
void check_device(const Plan& plan) {
  if (!is_on_gpu(plan)) return;
  const Target& target = plan.target();
  const int present = cuda::device(target.index).sm;
  if (target.emulated || target.sm == present) return;
  throw Error(ErrorCode::unsupported, "target", target.to_string(),
              "sm_" + std::to_string(present) + ", the device that is there, or Target::emulate");
}

}  // namespace

Executor::Executor(Plan plan) : plan_(std::move(plan)), bytes_(plan_.workspace_bytes()) {
  check_device(plan_);
  if (bytes_ == 0) return;
  workspace_ = is_on_gpu(plan_) ? cuda::allocate(plan_.target().index, bytes_)
                                : ::operator new(bytes_, std::align_val_t{kWorkspaceAlignment});
  owned_ = true;
}

Executor::Executor(Plan plan, void* workspace, std::size_t bytes)
    : plan_(std::move(plan)), workspace_(workspace), bytes_(bytes) {
  check_device(plan_);
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
      owned_(std::exchange(other.owned_, false)) {}

Executor& Executor::operator=(Executor&& other) noexcept {
  std::swap(plan_, other.plan_);
  std::swap(workspace_, other.workspace_);
  std::swap(bytes_, other.bytes_);
  std::swap(owned_, other.owned_);
  return *this;
}

void Executor::run(const Bindings& bindings, Stream stream) {
  const detail::PlanState& state = plan_.state();
  if (bytes_ < state.workspace_bytes) {
    throw Error(ErrorCode::invalid_argument, "executor", "one that was moved from", "an executor with its workspace");
  }
  const Target& target = state.target;
  detail::validate(state.problem, bindings, {target.device, target.index});
  const auto run = [&] { state.implementation->run(state, bindings, static_cast<std::byte*>(workspace_), stream); };
  if (target.device == DeviceType::cpu) return run();
  const cuda::CurrentContext context(target.index);
  run();
}

void Executor::prepare() {
  const detail::PlanState& state = plan_.state();
  if (state.implementation->kernels == nullptr) return;
  const cuda::CurrentContext context(state.target.index);
  for (const cuda::KernelSource& source : state.implementation->kernels(state)) cuda::kernel(source, state.target);
}

}  // namespace tessera
