// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>

#include "base/checked.h"
#include "base/element.h"
#include "problem/operation.h"
#include "problem_fields.h"
#include "problem_words.h"
#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

bool has(const nb::dict& fields, const char* name) {
  PyObject* value = PyDict_GetItemString(fields.ptr(), name);
  return value != nullptr && value != Py_None;
}

std::int64_t product(std::int64_t a, std::int64_t b, const std::string& name) {
  if (const std::optional<std::int64_t> value = detail::checked_multiply(a, b)) return *value;
  throw Error(ErrorCode::overflow, name, "a default that does not fit in 64 bits", "the field given");
}

/// A source's sizes that its other fields decide, unless they are among `given`.
void complete(const Problem& p, KvSource& kv, const nb::dict& given, const std::string& name) {
  const bool packed = kv.layout == KvLayout::varlen;
  const bool paged = kv.layout == KvLayout::paged_table || kv.layout == KvLayout::paged_csr;
  if (packed && !has(given, "total")) kv.total = product(p.batch, kv.seqlen, name + ".total");
  if (paged && kv.page_size > 0 && kv.seqlen >= 0 && !has(given, "pages")) {
    kv.pages = product(p.batch, detail::ceil_div(kv.seqlen, kv.page_size), name + ".pages");
  }
  if (!has(given, "seqused")) {  // a page table and the cache of kv_append always have lengths
    kv.seqused = kv.layout == KvLayout::paged_table || p.operation == Operation::kv_append;
  }
}

nb::dict source_given(const nb::dict& given, const char* name) {
  return has(given, name) ? nb::borrow<nb::dict>(given[name]) : nb::dict();
}

void complete_rows(Problem& p, const nb::dict& given) {
  if (!has(given, "heads_kv")) p.heads_kv = p.heads_q;
  if (!has(given, "head_dim_v")) p.head_dim_v = p.head_dim_qk;
  if (!has(given, "k_type")) p.k_type = p.q_type;
  if (!has(given, "v_type")) p.v_type = p.q_type;
  if (!has(given, "o_type")) p.o_type = detail::is_quantised(p.q_type) ? DType::bf16 : p.q_type;
  if (p.q_layout == Layout::varlen && !has(given, "total_q")) p.total_q = product(p.batch, p.seqlen_q, "total_q");
}

void complete(Problem& p, const nb::dict& given) {
  complete_rows(p, given);
  if (p.is_linear()) {
    // A decode step has a state for each sequence, a chunk none.
    if (p.operation == Operation::linear_decode && !has(given, "slots")) p.linear.states = p.batch;
    return;
  }
  if (p.operation == Operation::quantize) return;
  if (!has(given, "compress_stride")) p.nsa.stride = p.nsa.length;
  if (!has(given, "select_block") && p.operation == Operation::nsa_select) p.nsa.block = p.nsa.length;
  const nb::dict kv = source_given(given, "kv");
  if (!has(kv, "layout") && p.operation == Operation::attention && p.q_layout == Layout::varlen) {
    p.kv.layout = KvLayout::varlen;
  }
  if (!has(kv, "seqlen")) p.kv.seqlen = p.seqlen_q;
  complete(p, p.kv, kv, "kv");
  if (p.kv2) complete(p, *p.kv2, source_given(given, "kv2"), "kv2");
}

Operation operation_named(nb::handle name) {
  const auto text = nb::cast<std::string>(name);
  if (const detail::OperationRules* found = detail::operation_named(text)) return found->operation;
  throw Error(ErrorCode::invalid_argument, "operation", "\"" + text + "\"", detail::operation_names());
}

Py_hash_t hash_of(const Problem& p) {
  std::size_t seed = static_cast<std::size_t>(p.operation);
  for (const std::int64_t size : {p.batch, p.seqlen_q, p.kv.seqlen, p.heads_q, p.heads_kv, p.head_dim_qk}) {
    seed = seed * 1000003 ^ std::hash<std::int64_t>{}(size);
  }
  return static_cast<Py_hash_t>(seed >> 1);  // never -1, which stands for an error
}

nb::object field_of(const Problem& p, const std::string& name) {
  if (name == "operation") {
    const std::string_view word = detail::name_of(p.operation);
    return nb::str(word.data(), word.size());
  }
  const Field<Problem>* found = field_named(problem_fields(), name);
  if (found == nullptr) throw nb::attribute_error(("Problem has no field '" + name + "'").c_str());
  return found->get(p);
}

}  // namespace

Problem problem_from(nb::str operation, const nb::kwargs& fields) {
  Problem p;
  p.operation = operation_named(operation);
  for (const auto& [key, value] : fields) {
    const auto name = nb::cast<std::string>(key);
    const Field<Problem>* found = field_named(problem_fields(), name);
    if (found == nullptr)
      throw nb::type_error(("Problem: got the field '" + name + "'; want one of Problem.fields()").c_str());
    if (!value.is_none()) found->set(p, value, name);
  }
  complete(p, fields);
  p.check();
  return p;
}

Problem problem_of(nb::handle given) {
  if (nb::isinstance<Problem>(given)) return nb::cast<Problem>(given);
  if (PyUnicode_Check(given.ptr())) return Problem::parse(nb::cast<std::string>(given));
  PyErr_Format(PyExc_TypeError, "problem: got %R; want a Problem or its line", given.ptr());
  nb::raise_python_error();
}

void define_problem(nb::module_& m) {
  nb::class_<Problem>(m, "Problem",
                      "What is to be computed: an operation and the fields of the C++ Problem, by keyword.\n"
                      "None leaves a field at its default, or at what other fields decide.")
      .def(
          "__init__",
          [](Problem* self, nb::str operation, const nb::kwargs& fields) {
            new (self) Problem(problem_from(std::move(operation), fields));
          },
          nb::arg("operation"), nb::arg("fields"),
          "operation: \"attention\", \"combine\", \"kv_append\", \"linear_decode\", \"linear_chunk\",\n"
          "\"nsa_pool\", \"nsa_select\", \"nsa_gate\" or \"quantize\".\n"
          "Raises ValueError naming the field, TypeError for a keyword that is none.")
      .def_static(
          "fields",
          [] {
            nb::list names;
            for (const Field<Problem>& field : problem_fields()) {
              names.append(nb::str(field.name.data(), field.name.size()));
            }
            return nb::tuple(names);
          },
          "Names of the fields.")
      .def_static("parse", &Problem::parse, nb::arg("line"), "From a line (docs/grammar.md). Raises ValueError.")
      .def("__str__", &Problem::to_string, "The shortest line that parses back to an equal problem.")
      .def("__repr__", [](const Problem& self) { return "Problem.parse(\"" + self.to_string() + "\")"; })
      .def("__getattr__", &field_of)
      .def("__hash__", &hash_of)
      .def("__eq__",
           [](const Problem& self, nb::handle other) {
             return nb::isinstance<Problem>(other) && self == nb::cast<const Problem&>(other);
           })
      .def("__getstate__", &Problem::to_string)
      .def("__setstate__", [](Problem* self, const std::string& line) { new (self) Problem(Problem::parse(line)); });
}

}  // namespace tessera::python
