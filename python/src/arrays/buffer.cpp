// SPDX-License-Identifier: Apache-2.0
// Memory that a run writes and another library then owns through DLPack: how results reach jax in every dtype, bf16
// among them, without a copy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "arrays/buffer.h"
#include "arrays/dlpack_exchange.h"
#include "cuda/driver/device.h"
#include "tessera/error.h"
#include "tessera/tensor.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

constexpr std::align_val_t kAlignment{64};  // what jax wants of memory that it shall not copy; a GPU's has more

struct Release {
  void operator()(void* data) const noexcept { ::operator delete(data, kAlignment); }
};
struct ReleaseOnDevice {
  int index;
  void operator()(void* data) const noexcept { cuda::release(index, data); }
};
using Memory = std::shared_ptr<void>;

struct Buffer {
  Memory memory;
  Tensor tensor;
};

/// What a consumer of the capsule owns.
template <class Managed>
struct Export {
  Managed managed{};
  Buffer buffer;  // keeps the memory, and shape and strides that the managed tensor points to
};

template <class Managed>
void release(Managed* managed) {
  delete static_cast<Export<Managed>*>(managed->context);
}

/// A capsule that was not consumed owns its export still; a consumer renames it.
template <class Managed>
nb::object capsule_of(const Buffer& buffer, const char* name, void (*destroy)(PyObject*)) {
  auto owner = std::make_unique<Export<Managed>>();
  owner->buffer = buffer;
  owner->managed.context = owner.get();
  owner->managed.deleter = &release<Managed>;
  owner->buffer.tensor.to_dlpack(owner->managed.tensor);
  if constexpr (std::is_same_v<Managed, DlManagedVersioned>) owner->managed.version = {1, 0};
  PyObject* capsule = PyCapsule_New(&owner->managed, name, destroy);
  if (capsule == nullptr) nb::raise_python_error();
  owner.release();
  return nb::steal(capsule);
}

template <class Managed>
void destroy_unused(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

constexpr const char* kPlain = "dltensor";
constexpr const char* kVersioned = "dltensor_versioned";

nb::object export_buffer(const Buffer& buffer, nb::handle max_version) {
  const bool versioned = !max_version.is_none() && nb::cast<int>(nb::int_(nb::object(max_version[0]))) >= 1;
  if (versioned) {
    return capsule_of<DlManagedVersioned>(
        buffer, kVersioned, [](PyObject* capsule) { destroy_unused<DlManagedVersioned>(capsule, kVersioned); });
  }
  return capsule_of<DlManaged>(buffer, kPlain, [](PyObject* capsule) { destroy_unused<DlManaged>(capsule, kPlain); });
}

Buffer make_buffer(const std::vector<std::int64_t>& shape, const std::string& dtype, int device) {
  Buffer buffer;
  buffer.tensor = Tensor::contiguous(nullptr, parse_dtype(dtype), shape.data(), static_cast<int>(shape.size()));
  const std::size_t bytes =
      std::max<std::size_t>(static_cast<std::size_t>(buffer.tensor.numel()) * size_of(buffer.tensor.dtype), 1);
  if (device < 0) {
    buffer.memory = Memory(::operator new(bytes, kAlignment), Release{});
  } else {
    buffer.memory = Memory(cuda::allocate(device, bytes), ReleaseOnDevice{device});
    buffer.tensor.device = {DeviceType::cuda, device};
  }
  buffer.tensor.data = buffer.memory.get();
  return buffer;
}

}  // namespace

void define_buffer(nb::module_& m) {
  nb::class_<Buffer>(
      m, "Buffer",
      "Uninitialised memory of a shape and dtype (\"bf16\"), 64-byte aligned, for from_dlpack to take, on the CPU\n"
      "or on a GPU. What was written to it must be complete when it is taken: no stream is waited for.")
      .def(
          "__init__",
          [](Buffer* self, const std::vector<std::int64_t>& shape, const std::string& dtype, int device) {
            new (self) Buffer(make_buffer(shape, dtype, device));
          },
          nb::arg("shape"), nb::arg("dtype"), nb::arg("device") = -1)
      .def_prop_ro("shape",
                   [](const Buffer& self) {
                     nb::list sizes;
                     for (int i = 0; i < self.tensor.rank; ++i)
                       sizes.append(self.tensor.shape[static_cast<std::size_t>(i)]);
                     return nb::tuple(sizes);
                   })
      .def_prop_ro(
          "dtype", [](const Buffer& self) { return std::string(to_string(self.tensor.dtype)); },
          "Tessera's name of the dtype.")
      .def(
          "__dlpack__",
          [](const Buffer& self, nb::handle /*stream*/, nb::handle max_version, nb::handle /*dl_device*/,
             nb::handle /*copy*/) { return export_buffer(self, max_version); },
          nb::kw_only(), nb::arg("stream").none() = nb::none(), nb::arg("max_version").none() = nb::none(),
          nb::arg("dl_device").none() = nb::none(), nb::arg("copy").none() = nb::none())
      .def("__dlpack_device__", [](const Buffer& self) {
        const Device& device = self.tensor.device;
        return nb::make_tuple(device.type == DeviceType::cuda ? detail::kDlCuda : detail::kDlCpu, device.index);
      });
}

}  // namespace tessera::python
