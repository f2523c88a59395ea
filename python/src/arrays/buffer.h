// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Buffer: memory of our own that other libraries take over through DLPack.
void define_buffer(nanobind::module_& m);

}  // namespace tessera::python
