// SPDX-License-Identifier: Apache-2.0
#include "arrays/array_dtype.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

struct NumpyName {
  std::string_view name;  // numpy's dtype.name
  DType dtype;
};
constexpr NumpyName kNumpyNames[] = {
    {"float64", DType::fp64},       {"float32", DType::fp32},     {"float16", DType::fp16},  {"bfloat16", DType::bf16},
    {"float8_e4m3fn", DType::e4m3}, {"float8_e5m2", DType::e5m2}, {"int8", DType::int8},     {"int32", DType::int32},
    {"int64", DType::int64},        {"uint8", DType::uint8},      {"uint32", DType::uint32}, {"uint64", DType::uint64},
    {"bool", DType::uint8},
};

[[noreturn]] void refuse(std::string_view name, const std::string& got, const char* want) {
  throw Error(ErrorCode::invalid_argument, std::string(name), got, want);
}

constexpr const char* kKnownTypes =
    "float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int32, int64, uint8, uint32 or uint64";

DType inspect(nb::handle dtype, std::string_view name) {
  const std::string numpy_name = nb::cast<std::string>(nb::str(nb::object(dtype.attr("name"))));
  if (!nb::cast<bool>(dtype.attr("isnative"))) {
    refuse(name, numpy_name + " in a foreign byte order",
           "the machine's byte order, as array.astype(dtype.newbyteorder('=')) gives");
  }
  for (const NumpyName& each : kNumpyNames) {
    if (each.name == numpy_name) return each.dtype;
  }
  refuse(name, "an array of " + numpy_name, kKnownTypes);
}

/// numpy has one dtype object for each plain type, so a handful of pointers answers nearly every call. Entries live as
/// long as the process, like the objects themselves.
struct Known {
  PyObject* object;  // owned reference
  DType dtype;
};
constexpr std::size_t kMostKnown = 32;

std::vector<Known>& known() {
  static std::vector<Known> entries;
  return entries;
}

}  // namespace

std::optional<DType> dtype_of_array(PyObject* array, std::string_view name) {
  static PyObject* const name_of_dtype = PyUnicode_InternFromString("dtype");
  PyObject* attribute = PyObject_GetAttr(array, name_of_dtype);
  if (attribute == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  const nb::object dtype = nb::steal(attribute);
  for (const Known& entry : known()) {
    if (entry.object == dtype.ptr()) return entry.dtype;
  }
  if (!nb::hasattr(dtype, "isnative")) return std::nullopt;  // another library's idea of a dtype
  const DType found = inspect(dtype, name);
  if (known().size() < kMostKnown) known().push_back({dtype.inc_ref().ptr(), found});
  return found;
}

DType dtype_of_format(const char* format, Py_ssize_t item_size, std::string_view name) {
  const std::string whole = format == nullptr ? "B" : format;  // no format means bytes
  std::string_view code = whole;
  if (!code.empty() && std::strchr("@=<|", code[0]) != nullptr) code.remove_prefix(1);  // "<": little-endian hosts only
  if (code.size() == 1) {
    const bool is_signed = std::strchr("bhilqn", code[0]) != nullptr;
    const bool is_unsigned = std::strchr("BHILQN?", code[0]) != nullptr;
    if (code[0] == 'd') return DType::fp64;
    if (code[0] == 'f') return DType::fp32;
    if (code[0] == 'e') return DType::fp16;
    if (is_signed && item_size == 1) return DType::int8;
    if (is_signed && item_size == 4) return DType::int32;
    if (is_signed && item_size == 8) return DType::int64;
    if (is_unsigned && item_size == 1) return DType::uint8;
    if (is_unsigned && item_size == 4) return DType::uint32;
    if (is_unsigned && item_size == 8) return DType::uint64;
  }
  refuse(name, "a buffer of format '" + whole + "'", kKnownTypes);
}

}  // namespace tessera::python
