// SPDX-License-Identifier: Apache-2.0
#include "tessera/executor.h"

#include <utility>

#include "bindings/validate.h"
#include "plan/implementations.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 64;  // a cache line and an AVX-512 vector

}  // namespace

Executor::Executor(Plan plan)
    : plan_(std::move(plan)),
      backend_(plan_.state().backend),
      kept_(backend_->open(plan_.state())),
      bytes_(plan_.workspace_bytes()) {
  if (bytes_ == 0) return;
  workspace_ = backend_->allocate(plan_.target(), bytes_);
  owned_ = true;
}

Executor::Executor(Plan plan, void* workspace, std::size_t bytes)
    : plan_(std::move(plan)), backend_(plan_.state().backend), kept_(backend_->open(plan_.state())) {
  use(workspace, bytes);
}

void Executor::use(void* workspace, std::size_t bytes) {
  if (owned_) {
    throw Error(ErrorCode::invalid_argument, "workspace", "other memory for an executor that allocated its own",
                "an executor of the caller's memory");
  }
  const std::size_t need = plan_.workspace_bytes();
  if (bytes < need || (workspace == nullptr && need > 0)) {
    throw Error(ErrorCode::invalid_argument, "workspace",
                workspace == nullptr ? "nullptr" : std::to_string(bytes) + " bytes", std::to_string(need) + " bytes");
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    throw Error(ErrorCode::invalid_argument, "workspace", "a misaligned address", "a multiple of 64 bytes");
  }
  workspace_ = workspace;
  bytes_ = bytes;
}

Executor::~Executor() {
  if (owned_) backend_->release(plan_.target(), workspace_);
}

// The moved-from plan stays shared: Plan has no empty state, and a copy of it is a reference count.
Executor::Executor(Executor&& other) noexcept
    : plan_(other.plan_),
      backend_(std::exchange(other.backend_, nullptr)),
      kept_(std::move(other.kept_)),
      workspace_(std::exchange(other.workspace_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      owned_(std::exchange(other.owned_, false)) {}

Executor& Executor::operator=(Executor&& other) noexcept {
  std::swap(plan_, other.plan_);
  std::swap(backend_, other.backend_);
  std::swap(kept_, other.kept_);
  std::swap(workspace_, other.workspace_);
  std::swap(bytes_, other.bytes_);
  std::swap(owned_, other.owned_);
  return *this;
}

void Executor::run(const Bindings& bindings, Stream stream) {
  if (backend_ == nullptr) {
    throw Error(ErrorCode::invalid_argument, "executor", "one that was moved from", "an executor with its workspace");
  }
  const detail::PlanState& state = plan_.state();
  const Device device{state.target.device, state.target.index};
  const detail::HostCallables callables(state.callables, bindings, device.type);
  detail::validate(state.problem, state.rules, callables.bindings(), device);
  backend_->run(state, kept_.get(), callables.bindings(), static_cast<std::byte*>(workspace_), stream);
}

void Executor::prepare() {
  if (backend_ != nullptr) backend_->prepare(plan_.state(), kept_.get());
}

}  // namespace tessera
