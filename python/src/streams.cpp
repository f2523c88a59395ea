// SPDX-License-Identifier: Apache-2.0
// Streams of other libraries, by their handles.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>

#include "cuda/driver/device.h"
#include "host_operations.h"

namespace nb = nanobind;

namespace tessera::python {

void define_streams(nb::module_& m) {
  m.def(
      "is_capturing",
      [](int device, std::uintptr_t stream) {
        const cuda::CurrentContext context(device);
        return cuda::is_capturing(reinterpret_cast<void*>(stream));
      },
      nb::arg("device"), nb::arg("stream"),
      "Whether a CUstream (0: the legacy default) of a GPU is being captured into a graph, or does not tell because\n"
      "another one is that waits for it.");
  m.def(
      "stream_id",
      [](int device, std::uintptr_t stream) -> std::optional<std::uint64_t> {
        const cuda::CurrentContext context(device);
        return cuda::stream_id(reinterpret_cast<void*>(stream));
      },
      nb::arg("device"), nb::arg("stream"),
      "What no other stream of the process ever has, unlike its handle; None where the driver does not tell.");
}

}  // namespace tessera::python
