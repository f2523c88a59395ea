// SPDX-License-Identifier: Apache-2.0
#include "torch/versions.h"

#include <nanobind/nanobind.h>

#include "torch/functions.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

bool is_counted(nb::handle object, const TorchFunctions& torch) {
  if (PyObject_IsInstance(object.ptr(), torch.tensor.ptr()) != 1) return false;
  return !nb::cast<bool>(object.attr("is_inference")());  // which have no counter
}

}  // namespace

void count_writes(const std::vector<PyObject*>& written) {
  if (written.empty()) return;
  const TorchFunctions* torch = find_torch();
  if (torch == nullptr) return;
  for (PyObject* object : written) {
    if (is_counted(object, *torch)) call(torch->increment_version, object);
  }
}

}  // namespace tessera::python
