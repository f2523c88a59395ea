// SPDX-License-Identifier: Apache-2.0
// Scores and masks as C++ text, registered from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>

#include "host_operations.h"
#include "tessera/callable.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

using Extra = std::tuple<std::string, std::string, int>;  // name, dtype, dimensions

std::vector<ExtraTensor> tensors_of(const std::vector<Extra>& extras) {
  std::vector<ExtraTensor> tensors;
  for (const auto& [name, dtype, rank] : extras) tensors.push_back({name, parse_dtype(dtype, "extras"), rank});
  return tensors;
}

}  // namespace

void define_registered(nb::module_& m) {
  m.def(
      "register_score",
      [](const std::string& name, const std::string& text, const std::vector<Extra>& extras,
         std::optional<std::string> derivative_text, std::string program) {
        ScoreText score{text, tensors_of(extras)};
        score.derivative_text = std::move(derivative_text);
        score.program = std::move(program);
        register_score(name, std::move(score));
      },
      nb::arg("name"), nb::arg("text"), nb::arg("extras"), nb::arg("derivative_text").none(), nb::arg("program") = "",
      "Names a score by its C++ text; extras: (name, dtype, dimensions) of each tensor that it reads; program: for the "
      "CPU.");
  m.def(
      "register_mask",
      [](const std::string& name, const std::string& text, const std::vector<Extra>& extras, std::string program) {
        MaskText mask{text, tensors_of(extras)};
        mask.program = std::move(program);
        register_mask(name, std::move(mask));
      },
      nb::arg("name"), nb::arg("text"), nb::arg("extras"), nb::arg("program") = "", "Names a mask, likewise.");
  m.def(
      "is_registered",
      [](const std::string& kind, const std::string& name) {
        return kind == "score" ? registered_score(name) != nullptr : registered_mask(name) != nullptr;
      },
      nb::arg("kind"), nb::arg("name"), "Whether a \"score\" or \"mask\" has the name.");
}

}  // namespace tessera::python
