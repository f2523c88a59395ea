// SPDX-License-Identifier: Apache-2.0
// A tensor that owns its memory: what the readers return and the tools compute on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/tensor.h"

namespace tessera::files {

class Array {
 public:
  Array() = default;
  /// Uninitialised, 64-byte aligned, row-major. Throws Error{invalid_argument} on a negative size or more dimensions
  /// than a Tensor can have, Error{overflow} when the bytes do not fit in int64; `argument` names it in both.
  Array(DType dtype, std::vector<std::int64_t> shape, std::string_view argument = "array");

  [[nodiscard]] DType dtype() const noexcept { return view_.dtype; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] std::byte* data() const noexcept { return memory_.get(); }
  /// The view; valid while this Array lives.
  [[nodiscard]] const Tensor& tensor() const noexcept { return view_; }
  explicit operator bool() const noexcept { return static_cast<bool>(view_); }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::vector<std::int64_t> shape_;
  std::size_t size_bytes_ = 0;
  std::unique_ptr<std::byte[], Free> memory_;
  Tensor view_;
};

/// Elements of a shape times `element_size`. Throws Error{overflow} naming `argument` when it does not fit in int64,
/// also when a later dimension is zero; Error{invalid_argument} on a negative size.
std::int64_t checked_bytes(const std::vector<std::int64_t>& shape, std::size_t element_size, std::string_view argument);

/// "(2, 3)"
std::string describe_shape(const std::vector<std::int64_t>& shape);

}  // namespace tessera::files
