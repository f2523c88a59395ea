// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <deque>
#include <string_view>

#include "arrays/array.h"

namespace tessera::python {

/// Arrays that together are one tensor (parts, …): the distance between their memory is its first stride, so that
/// partial results made apart are merged where they lie.
class PartViews {
 public:
  /// `tuple`: arrays, at least one. Throws Error for shapes or dtypes that differ.
  PartViews(PyObject* tuple, std::string_view name, const Place& place = {});
  /// Same strides, and distances that one stride can express. Always so for one or two parts with the same strides.
  [[nodiscard]] bool evenly_spaced() const noexcept { return even_; }
  /// The tensor of all parts. Throws Error unless evenly_spaced().
  [[nodiscard]] Tensor tensor(std::string_view name) const;

 private:
  std::deque<ArrayView> views_;
  std::int64_t distance_ = 0;  // in elements
  bool even_ = true;
};

}  // namespace tessera::python
