// SPDX-License-Identifier: Apache-2.0
// The extension tessera._core: plans, arrays of other libraries, and what the build and the machine offer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays/buffer.h"
#include "errors.h"
#include "host_operations.h"
#include "kept_calls.h"
#include "plan.h"
#include "problem.h"
#include "tessera/plan.h"
#include "tessera/version.h"
#include "torch_run.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "The C++ library of Tessera: plans that run on arrays of any library.";
  tessera::python::register_errors();
  tessera::python::define_problem(m);
  tessera::python::define_plan(m);
  tessera::python::define_buffer(m);
  tessera::python::define_host_operations(m);
  tessera::python::define_skip_state(m);
  tessera::python::define_streams(m);
  tessera::python::define_registered(m);
  tessera::python::define_torch_run(m);
  tessera::python::define_kept_calls(m);
  tessera::python::define_jax_run(m);
  m.def("version", &tessera::version, "The library's version, \"0.1.0\".");
  m.def("build_info", &tessera::build_info,
        "Version, compiler, build type, instruction sets, OpenMP and Highway, one a line.");
  m.def("cpu_isas", &tessera::cpu_isas, "Instruction sets that this build has and this machine can run, best first.");
}
