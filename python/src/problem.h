// SPDX-License-Identifier: Apache-2.0
// Problems made of Python's keywords, without a line in between.
#pragma once

#include <nanobind/nanobind.h>

#include "tessera/problem.h"

namespace tessera::python {

/// A checked problem of `operation` ("attention") from keywords that are the names of Problem's fields. A value that
/// another field decides unless it is given (heads_kv by heads_q) follows the rules of Problem::parse. Throws Error
/// naming the field, as check() does; Python's TypeError for a keyword that is no field.
Problem problem_from(nanobind::str operation, const nanobind::kwargs& fields);

/// `given` itself where it is a Problem, else the problem of the line it is.
Problem problem_of(nanobind::handle given);

void define_problem(nanobind::module_& m);

}  // namespace tessera::python
