// SPDX-License-Identifier: Apache-2.0
// torch as the extension calls it: by the Python functions of a torch that somebody else has imported. Nothing of torch
// is needed to build this.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::python {

/// Objects of torch that calls need, found once and kept to the end of the process, as torch is.
struct TorchFunctions {
  nanobind::handle tensor;     // torch.Tensor
  nanobind::handle parameter;  // torch.nn.Parameter
  nanobind::handle increment_version;
  nanobind::handle empty_like;
  nanobind::handle new_empty_strided;  // the method, to be called with a tensor first
  nanobind::handle is_neg;             // likewise
  nanobind::handle is_grad_enabled;
  nanobind::handle function_modes;    // how many modes of torch functions are entered
  nanobind::handle profiler_enabled;  // whether a profiler records
  nanobind::handle forward_ad;        // the module; its _current_level is −1 outside of forward-mode AD
  nanobind::handle included_keys;     // dispatch keys that this thread's modes add to every call
  nanobind::handle excluded_keys;     // and those that they keep from it
  nanobind::handle uint8;             // the dtype
  nanobind::handle current_stream;    // handle of the stream that is current on a GPU; invalid without CUDA
};

/// nullptr before torch is imported. The interpreter lock must be held. Throws what an import throws.
const TorchFunctions* find_torch();

/// function(arguments…), by vectorcall. Throws python_error.
template <class... Arguments>
nanobind::object call(nanobind::handle function, Arguments... arguments) {
  constexpr std::size_t count = sizeof...(Arguments);
  std::array<PyObject*, count + 1> passed{nullptr, nanobind::handle(arguments).ptr()...};
  PyObject* result =
      PyObject_Vectorcall(function.ptr(), passed.data() + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) nanobind::raise_python_error();
  return nanobind::steal(result);
}

/// The attribute of that name, which is an interned text. Throws python_error.
inline nanobind::object attribute(nanobind::handle object, nanobind::handle name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name.ptr());
  if (found == nullptr) nanobind::raise_python_error();
  return nanobind::steal(found);
}

/// Whether function() is true. Throws python_error.
inline bool is_true(nanobind::object object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) nanobind::raise_python_error();
  return truth == 1;
}

}  // namespace tessera::python
