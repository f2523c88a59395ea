// SPDX-License-Identifier: Apache-2.0
// Takes 64-byte aligned buffers from a workspace. With a null base it only counts bytes, so that one layout function
// both plans the size and places the buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace tessera::cpu {

class Arena {
 public:
  explicit Arena(std::byte* base = nullptr) : base_(base) {}

  /// Takes an array of these sizes. Throws Error{overflow} if its bytes, or the whole arena's, do not fit 64 bits.
  template <class T, class... Sizes>
  T* take(Sizes... sizes) {
    const std::size_t at = used_;
    reserve({static_cast<std::int64_t>(sizes)...}, sizeof(T));
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  void reserve(std::initializer_list<std::int64_t> sizes, std::size_t element);

  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace tessera::cpu
