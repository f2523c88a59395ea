// SPDX-License-Identifier: Apache-2.0
#include "arrays/parts.h"

#include <string>

#include "tessera/error.h"

namespace tessera::python {
namespace {

std::int64_t address_of(const Tensor& tensor) noexcept { return reinterpret_cast<std::intptr_t>(tensor.bytes()); }

bool same_strides(const Tensor& a, const Tensor& b) noexcept {
  for (std::size_t i = 0; i < static_cast<std::size_t>(a.rank); ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

}  // namespace

PartViews::PartViews(PyObject* tuple, std::string_view name, const Place& place) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  if (count < 1) throw Error(ErrorCode::invalid_argument, std::string(name), "no parts", "one or more");
  for (Py_ssize_t i = 0; i < count; ++i) {
    views_.emplace_back(PyTuple_GetItem(tuple, i), name, ArrayView::Use::read, place);
    const Tensor& first = views_.front().tensor();
    const Tensor& part = views_.back().tensor();
    if (part.rank != first.rank || part.shape != first.shape || part.dtype != first.dtype ||
        !(part.device == first.device)) {
      throw Error(ErrorCode::invalid_argument, std::string(name) + "[" + std::to_string(i) + "]", part.describe(),
                  "the same as part 0, " + first.describe());
    }
    if (i == 0) continue;
    const auto element = static_cast<std::int64_t>(size_of(first.dtype));
    const std::int64_t bytes = address_of(part) - address_of(first);
    if (i == 1) distance_ = bytes / element;
    even_ = even_ && same_strides(first, part) && bytes == distance_ * element * i;
  }
  if (views_.front().tensor().rank >= Tensor::kMaxRank) {
    throw Error(ErrorCode::invalid_argument, std::string(name), views_.front().tensor().describe(),
                "fewer than " + std::to_string(Tensor::kMaxRank) + " dimensions");
  }
}

Tensor PartViews::tensor(std::string_view name) const {
  if (!even_) {
    throw Error(ErrorCode::invalid_argument, std::string(name), "parts at uneven distances or of different strides",
                "one tensor, or parts that lie evenly");
  }
  const Tensor& first = views_.front().tensor();
  Tensor whole = first;
  whole.rank = first.rank + 1;
  whole.shape[0] = static_cast<std::int64_t>(views_.size());
  whole.strides[0] = distance_;
  for (std::size_t i = 0; i < static_cast<std::size_t>(first.rank); ++i) {
    whole.shape[i + 1] = first.shape[i];
    whole.strides[i + 1] = first.strides[i];
  }
  return whole;
}

}  // namespace tessera::python
