// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>

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

/// The keyword of a problem's field: those of one operation are flat in Python.
std::string keyword_of(std::string_view field) {
  if (field == "linear.states") return "slots";
  for (const std::string_view operation : {"linear.", "append.", "combine."}) {
    if (field.starts_with(operation)) return std::string(field.substr(operation.size()));
  }
  return std::string(field);
}

}  // namespace

// std::bad_alloc becomes MemoryError by nanobind itself.
void register_errors() {
  nanobind::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const Error named(error.code(), keyword_of(error.argument()), error.got(), error.want());
      PyErr_SetString(exception_of(error.code()), named.what());
    }
  });
}

}  // namespace tessera::python
