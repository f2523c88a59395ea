// SPDX-License-Identifier: Apache-2.0
#include "files/array.h"

#include <limits>
#include <new>
#include <string>
#include <utility>

#include "tessera/error.h"

namespace tessera::files {
namespace {

constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector

}  // namespace

void Array::Free::operator()(std::byte* memory) const noexcept { ::operator delete[](memory, kAlignment); }

std::string describe_shape(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis != 0) text += ", ";
    text += std::to_string(shape[axis]);
  }
  return text + ")";
}

std::int64_t checked_bytes(const std::vector<std::int64_t>& shape, std::size_t element_size,
                           std::string_view argument) {
  auto bytes = static_cast<std::int64_t>(element_size);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) {
      throw Error(ErrorCode::invalid_argument, std::string(argument), "shape " + describe_shape(shape),
                  "sizes of 0 and more");
    }
    if (size == 0) {
      empty = true;
    } else if (bytes > std::numeric_limits<std::int64_t>::max() / size) {
      throw Error(ErrorCode::overflow, std::string(argument), "shape " + describe_shape(shape),
                  "at most 2^63 - 1 bytes");
    } else {
      bytes *= size;
    }
  }
  return empty ? 0 : bytes;
}

Array::Array(DType dtype, std::vector<std::int64_t> shape, std::string_view argument) : shape_(std::move(shape)) {
  if (shape_.size() > static_cast<std::size_t>(Tensor::kMaxRank)) {
    throw Error(ErrorCode::invalid_argument, std::string(argument), std::to_string(shape_.size()) + " dimensions",
                "at most " + std::to_string(Tensor::kMaxRank));
  }
  size_bytes_ = static_cast<std::size_t>(checked_bytes(shape_, size_of(dtype), argument));
  // One byte at least, so that an empty array has an address too.
  memory_.reset(static_cast<std::byte*>(::operator new[](size_bytes_ + 1, kAlignment)));
  view_ = Tensor::contiguous(memory_.get(), dtype, shape_.data(), static_cast<int>(shape_.size()));
}

}  // namespace tessera::files
