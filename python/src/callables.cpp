// SPDX-License-Identifier: Apache-2.0
#include "callables.h"

#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

nb::object callable_or_nothing(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  if (PyCallable_Check(object.ptr()) == 0) {
    PyErr_Format(PyExc_TypeError, "%s: got %R; want a function or None", name, object.ptr());
    nb::raise_python_error();
  }
  return nb::borrow(object);
}

/// `answer` of the function called `name`. Raises TypeError for what is no number.
double number_of(const nb::object& answer, const char* name) {
  const double number = PyFloat_AsDouble(answer.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) != 0) {
      PyErr_Clear();
      PyErr_Format(PyExc_TypeError, "%s: got %R from the function; want a number", name, answer.ptr());
    }
    nb::raise_python_error();
  }
  return number;
}

}  // namespace

Callables::Callables(nb::handle score, nb::handle mask)
    : score_(callable_or_nothing(score, "score")), mask_(callable_or_nothing(mask, "mask")) {
  if (score_.is_valid() && nb::hasattr(score_, "derivative")) derivative_ = score_.attr("derivative");
}

void Callables::bind(Bindings& bindings) {
  if (score_.is_valid()) {
    bindings.score.value = &Callables::value;
    if (derivative_.is_valid()) bindings.score.derivative = &Callables::derivative;
    bindings.score.user = this;
  }
  if (mask_.is_valid()) {
    bindings.mask.visible = &Callables::visible;
    bindings.mask.user = this;
  }
}

double Callables::value(double score, const ScorePoint& at, void* self) {
  return number_of(static_cast<Callables*>(self)->score_(score, at.batch, at.head, at.query, at.key), "score");
}

double Callables::derivative(double score, const ScorePoint& at, void* self) {
  return number_of(static_cast<Callables*>(self)->derivative_(score, at.batch, at.head, at.query, at.key),
                   "score.derivative");
}

bool Callables::visible(const ScorePoint& at, void* self) {
  const nb::object answer = static_cast<Callables*>(self)->mask_(at.batch, at.head, at.query, at.key);
  const int truth = PyObject_IsTrue(answer.ptr());
  if (truth < 0) nb::raise_python_error();
  return truth != 0;
}

}  // namespace tessera::python
