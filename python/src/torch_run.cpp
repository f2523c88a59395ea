// SPDX-License-Identifier: Apache-2.0
#include "torch_run.h"

#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "arrays/array.h"
#include "plan/implementations.h"
#include "tessera/error.h"
#include "torch/functions.h"
#include "torch/versions.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

constexpr std::uintptr_t kBulk = 16;  // bytes: what bulk copies of GPUs (TMA) want rows to begin at

bool is_packed(const Tensor& tensor) {
  return tensor.is_contiguous() && reinterpret_cast<std::uintptr_t>(tensor.bytes()) % kBulk == 0;
}

/// torch draws int64 seeds, the slots are uint64: the same bits.
void as_words(Slot slot, Tensor& tensor) {
  const bool seed = slot == Slot::dropout_seed || slot == Slot::dropout_offset;
  if (seed && tensor.dtype == DType::int64) tensor.dtype = DType::uint64;
}

nb::object make(const TorchFunctions& torch, nb::handle like, nb::handle shape, nb::handle strides, nb::handle dtype) {
  static const nb::handle names = nb::make_tuple("dtype").release();
  PyObject* arguments[] = {nullptr, like.ptr(), shape.ptr(), strides.ptr(), dtype.ptr()};
  PyObject* made = PyObject_Vectorcall(torch.new_empty_strided.ptr(), arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                       names.ptr());
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

Stream current_stream(const TorchFunctions& torch, nb::handle device) {
  return {reinterpret_cast<void*>(nb::cast<std::uintptr_t>(call(torch.current_stream, device)))};
}

const TorchFunctions& torch_of_call() {
  const TorchFunctions* torch = find_torch();
  if (torch == nullptr) throw Error(ErrorCode::internal, "torch", "no such module", "torch, imported by the caller");
  return *torch;
}

/// The tensors of one run, by slot; kept until it ends.
class Bound {
 public:
  Bound(const Place& place, Bindings& bindings) : place_(place), bindings_(bindings) {}
  const Tensor& bind(Slot slot, nb::handle tensor, ArrayView::Use use) {
    std::optional<ArrayView>& view = views_[static_cast<std::size_t>(slot)];
    view.emplace(tensor.ptr(), to_string(slot), use, place_);
    Tensor& bound = bindings_[slot] = view->tensor();
    as_words(slot, bound);
    return bound;
  }

 private:
  const Place& place_;
  Bindings& bindings_;
  std::array<std::optional<ArrayView>, static_cast<std::size_t>(Slot::count_)> views_;
};

}  // namespace

TorchRun::TorchRun(nb::object plan, std::vector<Input> inputs, std::vector<Output> outputs)
    : owner_(std::move(plan)),
      plan_(nb::cast<PythonPlan&>(owner_)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      device_(nb::none()),
      workspace_shape_(nb::none()) {
  if (!plan_.on_gpu()) return;
  device_ = nb::int_(plan_.plan().target().index);
  const std::size_t bytes = plan_.plan().workspace_bytes();
  if (bytes > 0) workspace_shape_ = nb::make_tuple(bytes);
}

nb::list TorchRun::run(std::span<PyObject* const> tensors, const Scalars& scalars) const {
  if (tensors.size() != inputs_.size()) {
    throw Error(ErrorCode::invalid_argument, "tensors", std::to_string(tensors.size()) + " tensors",
                std::to_string(inputs_.size()));
  }
  const TorchFunctions& torch = torch_of_call();
  Bindings bindings;
  bindings.seed = scalars.seed;
  bindings.offset = scalars.offset;
  bindings.batch_offset = scalars.batch_offset;
  bindings.head_offset = scalars.head_offset;
  Queue queue;
  if (!device_.is_none()) queue.stream = current_stream(torch, device_);
  const Place place = plan_.place_of(queue.stream);
  Bound bound(place, bindings);
  std::vector<PyObject*> given(tensors.begin(), tensors.end());
  std::vector<nb::object> copies;
  std::vector<PyObject*> written;
  const detail::SlotRules& rules = plan_.plan().state().rules;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const auto& [slot, prepare] = inputs_[i];
    if (slot == Slot::count_) continue;
    const bool writes = rules[slot].written;
    const Tensor& view = bound.bind(slot, given[i], writes ? ArrayView::Use::write : ArrayView::Use::read);
    if (writes) written.push_back(given[i]);
    if (!prepare.is_none() && !is_packed(view)) {
      given[i] = copies.emplace_back(call(prepare, given[i])).ptr();
      bound.bind(slot, given[i], ArrayView::Use::read);
    }
  }
  nb::list made;
  for (const Output& output : outputs_) {
    const nb::object tensor = output.like >= 0 ? call(torch.empty_like, given[static_cast<std::size_t>(output.like)])
                                               : make(torch, tensors[0], output.shape, output.strides, output.dtype);
    bound.bind(output.slot, tensor, ArrayView::Use::write);
    made.append(tensor);
  }
  std::optional<ArrayView> workspace;
  if (!workspace_shape_.is_none()) {
    static const nb::handle one = nb::make_tuple(1).release();
    const nb::object memory = make(torch, tensors[0], workspace_shape_, one, torch.uint8);
    workspace.emplace(memory.ptr(), "workspace", ArrayView::Use::write, place);
  }
  plan_.compute(bindings, workspace ? &*workspace : nullptr, queue, PythonPlan::Lock::released);
  count_writes(written);  // outputs are new: nobody has saved what was there before
  return made;
}

nb::object TorchRun::results(std::span<PyObject* const> tensors, const Scalars& scalars) const {
  nb::list made = run(tensors, scalars);
  if (outputs_.size() == 1) return made[0];
  return nb::tuple(made);
}

namespace {

std::vector<TorchRun::Input> inputs_of(const nb::sequence& slots, const nb::sequence& prepare) {
  std::vector<TorchRun::Input> inputs;
  for (const nb::handle name : slots) inputs.push_back({name.is_none() ? Slot::count_ : slot_named(name), nb::none()});
  std::size_t i = 0;
  for (const nb::handle function : prepare) inputs.at(i++).prepare = nb::borrow(function);
  return inputs;
}

std::vector<TorchRun::Output> outputs_of(const nb::sequence& outputs) {
  std::vector<TorchRun::Output> found;
  for (const nb::handle each : outputs) {
    const nb::object slot = each[0], what = each[1];
    TorchRun::Output output{slot_named(slot), -1, {}, {}, {}};
    if (nb::isinstance<nb::int_>(what)) {
      output.like = nb::cast<std::ptrdiff_t>(what);
    } else {
      output.shape = what[0];
      output.strides = what[1];
      output.dtype = what[2];
    }
    found.push_back(std::move(output));
  }
  return found;
}

std::vector<PyObject*> items_of(const nb::tuple& tuple) {
  std::vector<PyObject*> items;
  items.reserve(tuple.size());
  for (const nb::handle item : tuple) items.push_back(item.ptr());
  return items;
}

/// The low 64 bits of an integer, which may be a negative int64.
std::uint64_t word_of(nb::handle number) {
  const unsigned long long word = PyLong_AsUnsignedLongLongMask(number.ptr());
  if (PyErr_Occurred() != nullptr) nb::raise_python_error();
  return word;
}

Scalars scalars_of(const nb::tuple& given) {
  return {word_of(given[0]), word_of(given[1]), nb::cast<std::int64_t>(given[2]), nb::cast<std::int64_t>(given[3])};
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<TorchRun>(self)->visit(visit, arg) : 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {0, nullptr}};

}  // namespace

int TorchRun::visit(visitproc visit, void* arg) const {
  Py_VISIT(owner_.ptr());
  for (const Input& input : inputs_) Py_VISIT(input.prepare.ptr());
  for (const Output& output : outputs_) Py_VISIT(output.dtype.ptr());
  return 0;
}

void define_torch_run(nb::module_& m) {
  nb::class_<TorchRun>(m, "TorchRun", nb::type_slots(slots), "A plan's run on torch tensors, which makes its outputs.")
      .def(
          "__init__",
          [](TorchRun* self, nb::object plan, const nb::sequence& inputs, const nb::sequence& outputs,
             const nb::sequence& prepare) {
            new (self) TorchRun(std::move(plan), inputs_of(inputs, prepare), outputs_of(outputs));
          },
          nb::arg("plan"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("prepare") = nb::make_tuple(),
          "inputs: slots of the tensors that a run gets, None for one that is not bound.\n"
          "outputs: (slot, index of the input that it is like) or (slot, (shape, strides, dtype)).\n"
          "prepare: for the first inputs, a function to the tensor to bind in place of one whose elements do not lie\n"
          "packed from a multiple of 16 bytes on, or None.")
      .def(
          "run",
          [](const TorchRun& self, const nb::tuple& tensors, const nb::tuple& scalars) {
            const std::vector<PyObject*> items = items_of(tensors);
            return self.run(items, scalars_of(scalars));
          },
          nb::arg("tensors"), nb::arg("scalars"),
          "The outputs, a list. scalars: dropout's seed and offset, batch_offset, head_offset.")
      .def(
          "__call__",
          [](const TorchRun& self, const nb::args& tensors) {
            const std::vector<PyObject*> items = items_of(tensors);
            return self.results(items, {});
          },
          "The output of a run with these tensors, all scalars 0, or a tuple of several.")
      .def(
          "with_scalars",
          [](const TorchRun& self, const nb::tuple& scalars, const nb::args& tensors) {
            const std::vector<PyObject*> items = items_of(tensors);
            return self.results(items, scalars_of(scalars));
          },
          "The same with scalars.");
}

}  // namespace tessera::python
