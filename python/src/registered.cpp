// SPDX-License-Identifier: Apache-2.0
// Scores and masks as C++ text, registered from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "arrays/array.h"
#include "host_operations.h"
#include "problem/registered_callables.h"
#include "tessera/callable.h"
#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

using Extra = std::tuple<std::string, std::string, int>;  // name, dtype, dimensions

std::vector<ExtraTensor> tensors_of(const std::vector<Extra>& extras) {
  std::vector<ExtraTensor> tensors;
  for (const auto& [name, dtype, rank] : extras) tensors.push_back({name, parse_dtype(dtype, "extras"), rank});
  return tensors;
}

/// What the program of a mask says of every tile of a problem: out (batch, heads, query blocks, key blocks), uint8,
/// gets TileClass. Query i stands at position i + q_offset, key j at j.
void classify_mask(const std::string& name, const nb::list& arrays, std::int64_t queries, std::int64_t keys,
                   std::pair<std::int64_t, std::int64_t> block, std::int64_t q_offset, nb::handle out) {
  Problem problem;
  problem.mask = name;
  const detail::RegisteredCallables registered(problem);
  if (registered.mask_program == nullptr) {
    throw Error(ErrorCode::invalid_argument, "mask", name, "a mask that was registered with a program");
  }
  std::vector<std::unique_ptr<ArrayView>> views;
  std::vector<Tensor> tensors;
  for (const nb::handle array : arrays) {
    views.push_back(std::make_unique<ArrayView>(array.ptr(), "extras", ArrayView::Use::read));
    tensors.push_back(views.back()->tensor());
  }
  const bool fitting = std::equal(tensors.begin(), tensors.end(), registered.mask->extras.begin(),
                                  registered.mask->extras.end(), [](const Tensor& tensor, const ExtraTensor& want) {
                                    return tensor.dtype == want.dtype && tensor.rank == want.rank;
                                  });
  if (!fitting) throw Error(ErrorCode::invalid_argument, "extras", "other arrays", "those of the mask");
  const ArrayView into(out.ptr(), "out", ArrayView::Use::write);
  const Tensor& t = into.tensor();
  const auto [rows, columns] = block;
  if (t.dtype != DType::uint8 || t.rank != 4 || !t.is_contiguous() || rows < 1 || columns < 1 ||
      t.shape[2] != (queries + rows - 1) / rows || t.shape[3] != (keys + columns - 1) / columns) {
    throw Error(ErrorCode::invalid_argument, "out", t.describe(),
                "contiguous uint8 (batch, heads, query blocks, key blocks) on cpu");
  }
  const Extras extras(tensors.data(), static_cast<int>(tensors.size()));
  auto* at = t.as<std::uint8_t>();
  for (std::int64_t b = 0; b < t.shape[0]; ++b) {
    for (std::int64_t h = 0; h < t.shape[1]; ++h) {
      for (std::int64_t i = 0; i < queries; i += rows) {
        for (std::int64_t j = 0; j < keys; j += columns) {
          const TileBounds tile{
              b, h, q_offset + i, q_offset + std::min(i + rows, queries), j, std::min(j + columns, keys)};
          *at++ = static_cast<std::uint8_t>(registered.mask_program->classify(tile, extras));
        }
      }
    }
  }
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
  m.def("classify_mask", &classify_mask, nb::arg("name"), nb::arg("arrays"), nb::arg("queries"), nb::arg("keys"),
        nb::arg("block"), nb::arg("q_offset"), nb::arg("out"),
        "What a traced mask says of each tile, into out: 0 hides all of it, 1 some, 2 nothing.");
  m.def(
      "is_registered",
      [](const std::string& kind, const std::string& name) {
        return kind == "score" ? registered_score(name) != nullptr : registered_mask(name) != nullptr;
      },
      nb::arg("kind"), nb::arg("name"), "Whether a \"score\" or \"mask\" has the name.");
}

}  // namespace tessera::python
