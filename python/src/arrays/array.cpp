// SPDX-License-Identifier: Apache-2.0
#include "arrays/array.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays/array_dtype.h"
#include "arrays/dlpack_exchange.h"
#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

using ViewOfObject = int (*)(void* object, DLTensor* out);

std::string type_name(PyObject* object) {
  const nb::handle type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return nb::cast<std::string>(type.attr("__module__")) + "." + nb::cast<std::string>(type.attr("__qualname__"));
}

[[noreturn]] void refuse(std::string_view name, const std::string& got, const std::string& want) {
  throw Error(ErrorCode::invalid_argument, std::string(name), got, want);
}

/// The pending Python exception as the `got` of an error; its first line says enough.
std::string take_exception() {
  nb::python_error error;
  std::string text = nb::cast<std::string>(nb::str(error.value()));
  return text.substr(0, text.find('\n'));
}

ViewOfObject find_exchange(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  // The table is static in its library, so the capsule need not be kept.
  auto* api = static_cast<DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->version.major != 1) api = api->previous;
  return api == nullptr ? nullptr : api->view_of_object;
}

/// nullptr for a type without the table. Types are kept, so that an address cannot come to mean another type.
ViewOfObject exchange_of(PyTypeObject* type) {
  static std::vector<std::pair<PyTypeObject*, ViewOfObject>> known;
  constexpr std::size_t kMostKnown = 32;
  for (const auto& [object, view] : known) {
    if (object == type) return view;
  }
  const ViewOfObject view = find_exchange(type);
  if (known.size() < kMostKnown) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known.emplace_back(type, view);
  }
  return view;
}

/// Before __dlpack__ is asked, which may move or synchronise: where the memory is.
void check_device(nb::handle object, std::string_view name, Device want) {
  const nb::object device = object.attr("__dlpack_device__")();
  const int type = nb::cast<int>(nb::int_(nb::object(device[0])));
  const int index = nb::cast<int>(nb::int_(nb::object(device[1])));
  const bool on_cpu = type == detail::kDlCpu || type == detail::kDlCudaHost;
  const Device there = on_cpu ? Device{} : Device{DeviceType::cuda, index};
  const bool known = on_cpu || type == detail::kDlCuda;
  if (known && there == want) return;
  const std::string got = known ? to_string(there) : "DLPack device type " + std::to_string(type);
  refuse(name, type_name(object.ptr()) + " on " + got, "an array on " + to_string(want));
}

/// The array API standard's number for a CUDA stream: the handle, 1 for the legacy default stream, whose handle is 0.
std::uintptr_t stream_number(Stream stream) noexcept {
  return stream.handle == nullptr ? 1 : reinterpret_cast<std::uintptr_t>(stream.handle);
}

/// A new reference to the capsule of object.__dlpack__.
PyObject* capsule_of(nb::handle object, const Place& place) {
  const nb::object method = object.attr("__dlpack__");
  nb::dict old_options;  // all that there was before DLPack 1.0
  if (place.device.type == DeviceType::cuda) old_options["stream"] = stream_number(place.stream);
  nb::dict options;
  options.update(old_options);
  options["max_version"] = nb::make_tuple(1, 2);
  options["copy"] = false;
  PyObject* arguments = PyTuple_New(0);
  PyObject* capsule = PyObject_Call(method.ptr(), arguments, options.ptr());
  if (capsule == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    capsule = PyObject_Call(method.ptr(), arguments, old_options.ptr());
  }
  Py_DECREF(arguments);
  if (capsule == nullptr) nb::raise_python_error();
  return capsule;
}

}  // namespace

ArrayView::ArrayView(PyObject* object, std::string_view name, Use use, const Place& place) : object_(object) {
  Py_INCREF(object_);
  try {
    if (take_exchange(name) || take_buffer(name, use) || take_dlpack(name, use, place)) return;
    PyErr_Format(PyExc_TypeError, "%s: got %s; want an array with __dlpack__ or the buffer protocol",
                 std::string(name).c_str(), type_name(object).c_str());
    nb::raise_python_error();
  } catch (...) {
    release();
    throw;
  }
}

void ArrayView::release() noexcept {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  Py_XDECREF(capsule_);
  Py_XDECREF(object_);
}

bool ArrayView::take_exchange(std::string_view name) {
  const ViewOfObject view = exchange_of(Py_TYPE(object_));
  if (view == nullptr) return false;
  DLTensor tensor{};
  if (view(object_, &tensor) != 0) refuse(name, type_name(object_) + ": " + take_exception(), "a tensor with memory");
  tensor_ = Tensor::from_dlpack(tensor, name);
  return true;
}

std::optional<Tensor> view_of(PyObject* object) {
  const ViewOfObject view = exchange_of(Py_TYPE(object));
  if (view == nullptr) return std::nullopt;
  DLTensor tensor{};
  if (view(object, &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  try {
    return Tensor::from_dlpack(tensor, "tensor");
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool ArrayView::take_buffer(std::string_view name, Use use) {
  if (PyObject_CheckBuffer(object_) == 0) return false;
  const std::optional<DType> dtype = dtype_of_array(object_, name);
  // Without a format numpy exports types that the format language lacks, and ml_dtypes' are such.
  if (PyObject_GetBuffer(object_, &buffer_, dtype ? PyBUF_STRIDES : PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    buffer_ = Py_buffer{};
    PyErr_Clear();
    return false;
  }
  if (use == Use::write && buffer_.readonly != 0)
    refuse(name, type_name(object_) + " that is read-only", "a writable array");
  tensor_.dtype = dtype ? *dtype : dtype_of_format(buffer_.format, buffer_.itemsize, name);
  if (buffer_.ndim > Tensor::kMaxRank) {
    refuse(name, std::to_string(buffer_.ndim) + " dimensions",
           "0 to " + std::to_string(Tensor::kMaxRank) + " dimensions");
  }
  const auto element = static_cast<Py_ssize_t>(size_of(tensor_.dtype));
  tensor_.data = buffer_.buf;
  tensor_.rank = buffer_.ndim;
  for (int i = 0; i < buffer_.ndim; ++i) {
    const auto at = static_cast<std::size_t>(i);
    tensor_.shape[at] = buffer_.shape[i];
    if (buffer_.shape[i] > 1 && buffer_.strides[i] % element != 0) {
      refuse(name, "a stride of " + std::to_string(buffer_.strides[i]) + " bytes",
             "a multiple of the element's " + std::to_string(element) + " bytes");
    }
    tensor_.strides[at] = buffer_.strides[i] / element;
  }
  return true;
}

bool ArrayView::take_dlpack(std::string_view name, Use use, const Place& place) {
  if (PyObject_HasAttrString(object_, "__dlpack__") == 0) return false;
  if (PyObject_HasAttrString(object_, "__dlpack_device__") != 0) check_device(object_, name, place.device);
  capsule_ = capsule_of(object_, place);
  if (PyCapsule_IsValid(capsule_, "dltensor_versioned") != 0) {
    const auto* managed = static_cast<DlManagedVersioned*>(PyCapsule_GetPointer(capsule_, "dltensor_versioned"));
    if (managed->version.major != 1) {
      refuse(name, "DLPack version " + std::to_string(managed->version.major), "version 1");
    }
    if (use == Use::write && (managed->flags & (kDlReadOnly | kDlCopied)) != 0) {
      refuse(name, type_name(object_) + " that is read-only", "a writable array");
    }
    tensor_ = Tensor::from_dlpack(managed->tensor, name);
    return true;
  }
  const auto* managed = static_cast<DlManaged*>(PyCapsule_GetPointer(capsule_, "dltensor"));
  if (managed == nullptr) nb::raise_python_error();
  // Such a capsule cannot tell that its memory must not be written, and jax's must not.
  if (use == Use::write) refuse(name, type_name(object_) + " that may be read-only", "a writable array");
  tensor_ = Tensor::from_dlpack(managed->tensor, name);
  return true;
}

}  // namespace tessera::python
