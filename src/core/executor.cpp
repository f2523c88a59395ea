// SPDX-License-Identifier: Apache-2.0
#include "tessera/executor.h"

#include <new>
#include <utility>

#include "core/implementations.h"
#include "core/validate.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kWorkspaceAlignment = 64;  // a cache line and an AVX-512 vector

}  // namespace

Executor::Executor(Plan plan) : plan_(std::move(plan)), bytes_(plan_.workspace_bytes()) {
  if (bytes_ == 0) return;
  workspace_ = ::operator new(bytes_, std::align_val_t{kWorkspaceAlignment});
  owned_ = true;
}

Executor::Executor(Plan plan, void* workspace, std::size_t bytes)
    : plan_(std::move(plan)), workspace_(workspace), bytes_(bytes) {
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
  if (owned_) ::operator delete(workspace_, std::align_val_t{kWorkspaceAlignment});
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
  detail::validate(state.problem, bindings, state.target.device);
  state.implementation->run(state, bindings, static_cast<std::byte*>(workspace_), stream);
}

}  // namespace tessera
