// SPDX-License-Identifier: Apache-2.0
#include "kept_calls.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "arrays/array.h"
#include "host_operations.h"
#include "tessera/error.h"
#include "torch/functions.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

constexpr std::size_t kMostKept = 4096;

using Keys = std::pair<std::uint64_t, std::uint64_t>;

std::vector<Keys>& keys_without_modes() {
  static std::vector<Keys> keys;
  return keys;
}

std::uint64_t raw_keys(nb::handle function) {
  static const nb::handle raw = nb::str("raw_repr").release();
  const nb::object keys = call(function);
  PyObject* self = keys.ptr();
  PyObject* number = PyObject_VectorcallMethod(raw.ptr(), &self, 1, nullptr);
  if (number == nullptr) nb::raise_python_error();
  return nb::cast<std::uint64_t>(nb::steal(number));
}

/// Whether a mode, transform, tracer or profiler of this thread wants to see calls.
bool is_seen(const TorchFunctions& torch) {
  static const nb::handle level = nb::str("_current_level").release();
  if (is_true(call(torch.profiler_enabled)) || is_true(call(torch.function_modes))) return true;
  if (nb::cast<int>(attribute(torch.forward_ad, level)) >= 0) return true;
  const Keys keys{raw_keys(torch.included_keys), raw_keys(torch.excluded_keys)};
  const std::vector<Keys>& plain = keys_without_modes();
  return std::find(plain.begin(), plain.end(), keys) == plain.end();
}

bool is_tensor(nb::handle object, const TorchFunctions& torch) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  return type == torch.tensor.ptr() || type == torch.parameter.ptr();
}

bool requires_grad(nb::handle tensor) {
  static const nb::handle name = nb::str("requires_grad").release();
  return is_true(attribute(tensor, name));
}

// Options ------------------------------------------------------------------------------------------------------------

void mix(std::size_t& hash, std::uint64_t word) noexcept {
  hash = (hash ^ static_cast<std::size_t>(word)) * 0x9E3779B97F4A7C15ULL;
  hash ^= hash >> 29;
}

std::uint64_t bits_of(PyObject* number) noexcept {
  const double value = PyFloat_AsDouble(number);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// Mixes type and value; false for an option that no key can hold.
bool mix_option(std::size_t& hash, PyObject* option) noexcept {
  const PyTypeObject* type = Py_TYPE(option);
  if (option == Py_None || type == &PyBool_Type) {
    mix(hash, option == Py_None ? 1 : option == Py_True ? 2 : 3);
  } else if (type == &PyFloat_Type) {
    mix(hash, bits_of(option));
  } else if (type == &PyLong_Type || type == &PyUnicode_Type) {
    mix(hash, static_cast<std::uint64_t>(PyObject_Hash(option)) + (type == &PyLong_Type ? 5 : 6));
  } else if (type == &PyTuple_Type) {
    const Py_ssize_t size = PyTuple_Size(option);
    mix(hash, static_cast<std::uint64_t>(size) + 7);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!mix_option(hash, PyTuple_GetItem(option, i))) return false;
    }
  } else {
    return false;
  }
  return true;
}

/// Of two options that a key can hold.
bool same_option(PyObject* a, PyObject* b) noexcept {
  if (a == b) return true;
  const PyTypeObject* type = Py_TYPE(a);
  if (type != Py_TYPE(b)) return false;
  if (type == &PyFloat_Type) return bits_of(a) == bits_of(b);
  if (type == &PyLong_Type) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  if (type == &PyUnicode_Type) return PyUnicode_Compare(a, b) == 0;
  if (type != &PyTuple_Type || PyTuple_Size(a) != PyTuple_Size(b)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(a); ++i) {
    if (!same_option(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i))) return false;
  }
  return true;
}

// The key ------------------------------------------------------------------------------------------------------------

CallKey::Rows rows_of(const Tensor& tensor) {
  CallKey::Rows rows{tensor.dtype, tensor.rank, {}};
  std::copy_n(tensor.shape.begin(), tensor.rank, rows.shape.begin());
  return rows;
}

/// nullopt for a call that somebody wants to see, or that has tensors or options which no key can hold.
std::optional<CallKey> key_of(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options) {
  CallKey key;
  const TorchFunctions* torch = find_torch();
  if (torch == nullptr || !mix_option(key.options_hash, options.ptr())) return std::nullopt;
  const std::array<nb::handle, 3> tensors{q, k, v};
  for (const nb::handle tensor : tensors) {
    if (!is_tensor(tensor, *torch)) return std::nullopt;
  }
  if (is_seen(*torch)) return std::nullopt;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::optional<Tensor> view = view_of(tensors[i].ptr());
    if (!view || (i > 0 && view->device != key.device)) return std::nullopt;
    if (is_true(call(torch->is_neg, tensors[i]))) return std::nullopt;
    key.device = view->device;
    key.rows[i] = rows_of(*view);
  }
  key.threads = key.device.type == DeviceType::cpu ? threads_of_calls() : 0;
  key.recorded = (requires_grad(q) || requires_grad(k) || requires_grad(v)) && is_true(call(torch->is_grad_enabled));
  key.options = options;
  return key;
}

}  // namespace

std::size_t KeptCalls::Hash::operator()(const CallKey& key) const noexcept {
  std::size_t hash = key.options_hash;
  for (const CallKey::Rows& rows : key.rows) {
    mix(hash, static_cast<std::uint64_t>(rows.dtype) * 64 + static_cast<std::uint64_t>(rows.rank));
    for (const std::int64_t size : rows.shape) mix(hash, static_cast<std::uint64_t>(size));
  }
  mix(hash, static_cast<std::uint64_t>(key.device.index) * 4 + (key.recorded ? 1 : 0));
  mix(hash, static_cast<std::uint64_t>(key.threads));
  return hash;
}

bool KeptCalls::Equal::operator()(const CallKey& a, const CallKey& b) const noexcept {
  return a.rows == b.rows && a.device == b.device && a.threads == b.threads && a.recorded == b.recorded &&
         same_option(a.options.ptr(), b.options.ptr());
}

const KeptCalls::Kept* KeptCalls::look(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options) {
  if (calls_.empty()) return nullptr;
  const std::optional<CallKey> key = key_of(q, k, v, options);
  if (!key) return nullptr;
  const auto at = calls_.find(*key);
  return at == calls_.end() ? nullptr : &at->second;
}

nb::object KeptCalls::call(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options) {
  const Kept* found = look(q, k, v, options);
  if (found == nullptr) return nb::none();
  const nb::object computes = found->computes;  // another thread may forget it during the run
  if (found->run == nullptr) return python::call(computes, q, k, v);
  const std::array<PyObject*, 3> tensors{q.ptr(), k.ptr(), v.ptr()};
  return found->run->results(tensors, {});
}

nb::object KeptCalls::find(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options) {
  const Kept* found = look(q, k, v, options);
  return found == nullptr ? nb::none() : found->computes;
}

void KeptCalls::keep(nb::handle q, nb::handle k, nb::handle v, const nb::tuple& options, nb::object computes) {
  std::optional<CallKey> key = key_of(q, k, v, options);
  if (!key) return;
  const TorchRun* run = nb::isinstance<TorchRun>(computes) ? nb::cast<const TorchRun*>(computes) : nullptr;
  if (calls_.size() >= kMostKept) calls_.clear();
  calls_.insert_or_assign(std::move(*key), Kept{std::move(computes), run});
}

void set_keys_without_modes(std::vector<Keys> pairs) { keys_without_modes() = std::move(pairs); }

int KeptCalls::visit(visitproc visit, void* arg) const {
  for (const auto& [key, kept] : calls_) {
    Py_VISIT(key.options.ptr());
    Py_VISIT(kept.computes.ptr());
  }
  return 0;
}

namespace {

// What a table keeps leads back to it, by way of functions and their modules.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<KeptCalls>(self)->visit(visit, arg) : 0;
}

int clear(PyObject* self) {
  nb::inst_ptr<KeptCalls>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)}, {0, nullptr}};

}  // namespace

void define_kept_calls(nb::module_& m) {
  nb::class_<KeptCalls>(m, "KeptCalls", nb::type_slots(slots),
                        "A table of calls that were made before and of what computes them.")
      .def(nb::init<>())
      .def("call", &KeptCalls::call, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("options"),
           "The result of a call that is kept, None for any other.")
      .def(
          "keep", &KeptCalls::keep, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("options"),
          nb::arg("computes"),
          "computes: a TorchRun, or a function of q, k and v. Nothing is kept for options other than None, bool, int,\n"
          "float, str and tuples of such, nor where somebody wants to see the call.")
      .def("find", &KeptCalls::find, nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("options"),
           "What computes a call that is kept, None for any other.")
      .def("clear", &KeptCalls::clear, "Forgets all.")
      .def("__len__", &KeptCalls::size);
  m.def("set_keys_without_modes", &set_keys_without_modes, nb::arg("pairs"),
        "The dispatch keys that a thread without modes includes and excludes: (included, excluded) of each kind.");
}

}  // namespace tessera::python
