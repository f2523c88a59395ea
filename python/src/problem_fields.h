// SPDX-License-Identifier: Apache-2.0
// The table of a problem's fields: what each is called in Python, how it is set and read there.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "tessera/problem.h"

namespace tessera::python {

/// One field of `Owner` (Problem or KvSource).
template <class Owner>
struct Field {
  std::string_view name;
  /// Throws Error naming the field, or Python's TypeError, for a value that cannot be one.
  void (*set)(Owner&, nanobind::handle value, std::string_view name);
  nanobind::object (*get)(const Owner&);
};

const std::vector<Field<Problem>>& problem_fields();
const std::vector<Field<KvSource>>& source_fields();

/// The field called `name`, nullptr for none.
template <class Owner>
const Field<Owner>* field_named(const std::vector<Field<Owner>>& fields, std::string_view name) {
  for (const Field<Owner>& field : fields) {
    if (field.name == name) return &field;
  }
  return nullptr;
}

}  // namespace tessera::python
