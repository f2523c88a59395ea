// SPDX-License-Identifier: Apache-2.0
// A plan's run on torch tensors.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <vector>

#include "plan.h"
#include "tessera/executor.h"

namespace tessera::python {

/// A plan and how it is run on torch tensors: which slots they are bound to, and the outputs to make. Kept with the
/// plan, so that a call asks torch for memory and for the current stream, and for nothing else.
class TorchRun {
 public:
  /// One of the tensors that a call gets.
  struct Input {
    Slot slot = Slot::count_;  // count_: not bound
    nanobind::object prepare;  // a function to the tensor to bind, for those that are not packed; None: as it is
  };
  /// A tensor to make: with the layout of an input, as it is bound, or of a shape of its own.
  struct Output {
    Slot slot;
    std::ptrdiff_t like = -1;  // an index of the inputs
    nanobind::object shape, strides, dtype;
  };

  TorchRun(nanobind::object plan, std::vector<Input> inputs, std::vector<Output> outputs);

  /// The outputs, a list, of a run with these tensors. On a GPU it is queued on the current stream, in a workspace of
  /// torch's allocator.
  [[nodiscard]] nanobind::list run(std::span<PyObject* const> tensors, const Scalars& scalars) const;
  /// The same: the output alone if there is one only, else a tuple.
  [[nodiscard]] nanobind::object results(std::span<PyObject* const> tensors, const Scalars& scalars) const;
  /// For Python's collector.
  int visit(visitproc visit, void* arg) const;

 private:
  nanobind::object owner_;  // keeps plan_
  PythonPlan& plan_;
  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  nanobind::object device_;           // index of the GPU; None: the CPU
  nanobind::object workspace_shape_;  // of bytes; None: no workspace
};

void define_torch_run(nanobind::module_& m);

}  // namespace tessera::python
