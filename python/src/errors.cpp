// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <nanobind/nanobind.h>

#include "tessera/error.h"

namespace tessera::python {
namespace {

PyObject* exception_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::unsupported:
      return PyExc_NotImplementedError;
    case ErrorCode::io:
      return PyExc_OSError;
    case ErrorCode::internal:
    case ErrorCode::cancelled:
      return PyExc_RuntimeError;
    case ErrorCode::invalid_argument:
    case ErrorCode::out_of_range:
    case ErrorCode::overflow:
    case ErrorCode::parse:
      break;
  }
  return PyExc_ValueError;
}

}  // namespace

// std::bad_alloc becomes MemoryError by nanobind itself.
void register_errors() {
  nanobind::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(exception_of(error.code()), error.what());
    }
  });
}

}  // namespace tessera::python
