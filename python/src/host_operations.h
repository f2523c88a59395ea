// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace tessera::python {

/// Worker threads of a call that does not say: the number that was set, or what OpenMP would use.
int threads_of_calls() noexcept;

/// Small things on the host: the longest sequence, names of built-in callables, the bits of dropout.
void define_host_operations(nanobind::module_& m);
/// What the driver says of a library's stream.
void define_streams(nanobind::module_& m);
/// Thresholds and tiles of skip states.
void define_skip_state(nanobind::module_& m);
/// Scores and masks as C++ text.
void define_registered(nanobind::module_& m);
/// Functions that XLA calls.
void define_jax_run(nanobind::module_& m);

}  // namespace tessera::python
