// SPDX-License-Identifier: Apache-2.0
#include "torch/functions.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

nb::handle kept(nb::object object) { return object.release(); }

TorchFunctions functions_of(const nb::object& torch) {
  const nb::object c = torch.attr("_C");
  const nb::object tensor = torch.attr("Tensor");
  TorchFunctions found;
  found.tensor = kept(tensor);
  found.parameter = kept(torch.attr("nn").attr("Parameter"));
  found.increment_version = kept(torch.attr("autograd").attr("graph").attr("increment_version"));
  found.empty_like = kept(torch.attr("empty_like"));
  found.new_empty_strided = kept(tensor.attr("new_empty_strided"));
  found.is_neg = kept(tensor.attr("is_neg"));
  found.is_grad_enabled = kept(torch.attr("is_grad_enabled"));
  found.function_modes = kept(c.attr("_len_torch_function_stack"));
  found.profiler_enabled = kept(torch.attr("autograd").attr("_profiler_enabled"));
  found.forward_ad = kept(torch.attr("autograd").attr("forward_ad"));
  found.included_keys = kept(c.attr("_dispatch_tls_local_include_set"));
  found.excluded_keys = kept(c.attr("_dispatch_tls_local_exclude_set"));
  found.uint8 = kept(torch.attr("uint8"));
  if (nb::hasattr(c, "_cuda_getCurrentRawStream")) found.current_stream = kept(c.attr("_cuda_getCurrentRawStream"));
  return found;
}

}  // namespace

const TorchFunctions* find_torch() {
  static TorchFunctions found;
  if (found.tensor.is_valid()) return &found;
  const nb::object torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
  if (!torch.is_valid()) return nullptr;
  if (nb::cast<bool>(nb::getattr(torch.attr("__spec__"), "_initializing", nb::bool_(false)))) return nullptr;
  found = functions_of(torch);
  return &found;
}

}  // namespace tessera::python
