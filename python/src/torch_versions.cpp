// SPDX-License-Identifier: Apache-2.0
#include "torch_versions.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace tessera::python {
namespace {

/// What is needed of torch, once someone has imported it. Kept to the end of the process, as torch is.
struct Torch {
  nb::handle tensor;             // torch.Tensor
  nb::handle increment_version;  // torch.autograd.graph.increment_version
};

const Torch* find_torch() {
  static Torch torch;
  if (torch.increment_version.is_valid()) return &torch;
  const nb::object module = nb::steal(PyImport_GetModule(nb::str("torch.autograd.graph").ptr()));
  if (!module.is_valid()) return nullptr;
  torch.tensor = nb::object(nb::module_::import_("torch").attr("Tensor")).release();
  torch.increment_version = nb::object(module.attr("increment_version")).release();
  return &torch;
}

bool is_counted(nb::handle object, const Torch& torch) {
  if (PyObject_IsInstance(object.ptr(), torch.tensor.ptr()) != 1) return false;
  return !nb::cast<bool>(object.attr("is_inference")());  // which have no counter
}

}  // namespace

void count_writes(const std::vector<PyObject*>& written) {
  const Torch* torch = find_torch();
  if (torch == nullptr) return;
  for (PyObject* object : written) {
    if (is_counted(object, *torch)) torch->increment_version(nb::handle(object));
  }
}

}  // namespace tessera::python
