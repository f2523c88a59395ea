// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <vector>

namespace tessera::python {

/// Raises the version counter of each torch tensor among `written`, as torch's own operators do: a backward for which
/// the tensor or a view of it was saved then raises, instead of computing with what has been written over it.
/// The interpreter lock must be held. Throws what torch raises.
void count_writes(const std::vector<PyObject*>& written);

}  // namespace tessera::python
