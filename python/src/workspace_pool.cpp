// SPDX-License-Identifier: Apache-2.0
#include "workspace_pool.h"

#include <algorithm>

namespace tessera::python {
namespace {

constexpr std::align_val_t kAlignment{64};                 // what Executor asks for
constexpr std::size_t kMostKept = std::size_t{256} << 20;  // bytes; more goes back to the system after its run
constexpr std::size_t kMostBlocks = 64;
// Blocks grow in steps of 1/4 of a power of two, so that problems of similar size share one.
std::size_t rounded(std::size_t bytes) noexcept {
  std::size_t step = 4096;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

WorkspacePool& WorkspacePool::shared() {
  static WorkspacePool pool;
  return pool;
}

WorkspacePool::Block WorkspacePool::take(std::size_t bytes) {
  if (bytes == 0) return {};
  {
    const std::lock_guard lock(mutex_);
    // The smallest that holds it, unless even that wastes more than it uses.
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->bytes >= bytes && (best == free_.end() || it->bytes < best->bytes)) best = it;
    }
    if (best != free_.end()) {
      const Block block = *best;
      free_.erase(best);
      kept_ -= block.bytes;
      return block;
    }
  }
  const std::size_t size = rounded(bytes);
  return {::operator new(size, kAlignment), size};
}

void WorkspacePool::give(Block block) noexcept {
  if (block.data == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    if (kept_ + block.bytes <= kMostKept && free_.size() < kMostBlocks) {
      try {
        free_.push_back(block);
        kept_ += block.bytes;
        return;
      } catch (const std::bad_alloc&) {  // then it is freed
      }
    }
  }
  ::operator delete(block.data, kAlignment);
}

void WorkspacePool::clear() noexcept {
  const std::lock_guard lock(mutex_);
  for (const Block& block : free_) ::operator delete(block.data, kAlignment);
  free_.clear();
  kept_ = 0;
}

}  // namespace tessera::python
