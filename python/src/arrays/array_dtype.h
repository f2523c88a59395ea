// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <optional>
#include <string_view>

#include "tessera/tensor.h"

namespace tessera::python {

/// Element type of an array whose attribute `dtype` is numpy's, with ml_dtypes' among them (bool counts as uint8);
/// nullopt without such an attribute. Throws Error naming `name` for a type that Tessera lacks and for a foreign byte
/// order.
std::optional<DType> dtype_of_array(PyObject* array, std::string_view name);

/// Element type from a format of Python's struct module ("f", "<e", …) and the item size in bytes.
DType dtype_of_format(const char* format, Py_ssize_t item_size, std::string_view name);

}  // namespace tessera::python
