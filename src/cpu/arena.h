// SPDX-License-Identifier: Apache-2.0
// Hands out 64-byte aligned pieces of a workspace. Over a null base it only counts, so that one layout function both
// plans the size and places the buffers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::cpu {

class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* take(std::int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace tessera::cpu
