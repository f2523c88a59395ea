// SPDX-License-Identifier: Apache-2.0
// Arrays of other Python libraries as views: nothing is copied, and nothing outlives the call that asked.
#pragma once

#include <Python.h>

#include <optional>
#include <string_view>

#include "tessera/executor.h"
#include "tessera/tensor.h"

namespace tessera::python {

/// Where a run takes its arrays. On a GPU, an array that keeps track of its own work (__dlpack__) is told the stream on
/// which it will be used, and orders that work before what comes there next.
struct Place {
  Device device;
  Stream stream;
};

/// Keeps an object and whatever exports its memory alive while its view is in use. The interpreter lock must be held at
/// construction and destruction.
class ArrayView {
 public:
  /// How the memory will be used; an output must be writable.
  enum class Use : bool { read, write };

  /// `name` is the argument's name in errors. Throws Error, nanobind::python_error with a TypeError for an object that
  /// is no array, and what its __dlpack__ raises. An object is asked for its memory only if that is at `place`; tensors
  /// of libraries that just show where it is may still be elsewhere.
  ArrayView(PyObject* object, std::string_view name, Use use, const Place& place = {});
  ~ArrayView() { release(); }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;

  [[nodiscard]] const Tensor& tensor() const noexcept { return tensor_; }

 private:
  void release() noexcept;
  bool take_exchange(std::string_view name);
  bool take_buffer(std::string_view name, Use use);
  bool take_dlpack(std::string_view name, Use use, const Place& place);

  Tensor tensor_;
  PyObject* object_ = nullptr;   // owned reference
  PyObject* capsule_ = nullptr;  // owned reference: of __dlpack__
  Py_buffer buffer_{};           // obj == nullptr: none
};

/// What an object shows by DLPack's table of C functions; nullopt for one that has no table, no memory or no dtype of
/// Tessera. The view is valid as long as the object.
std::optional<Tensor> view_of(PyObject* object);

}  // namespace tessera::python
