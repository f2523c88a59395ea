// SPDX-License-Identifier: Apache-2.0
// What a skip state is made of on the host: thresholds of every step, and tiles of ranges.
#include "tessera/skip_state.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "host_operations.h"
#include "problem.h"

namespace nb = nanobind;

namespace tessera::python {

void define_skip_state(nb::module_& m) {
  m.def(
      "skip_thresholds",
      [](nb::handle problem, std::int64_t steps, std::int64_t warm_up, std::pair<float, float> ramp,
         const std::vector<std::tuple<std::int64_t, float, float>>& heads) {
        SkipOptions options;
        options.steps = steps;
        options.warm_up = warm_up;
        options.ramp = {ramp.first, ramp.second};
        for (const auto& [head, first, last] : heads) options.heads.push_back({head, {first, last}});
        return skip_thresholds(problem_of(problem), options);
      },
      nb::arg("problem"), nb::arg("steps"), nb::arg("warm_up"), nb::arg("ramp"), nb::arg("heads"),
      "Thresholds of every step and query head in powers of two, one after another. heads: (head, first, last).");
  m.def(
      "skip_blocks",
      [](nb::handle problem, const std::vector<std::pair<std::int64_t, std::int64_t>>& ranges,
         const std::string& name) {
        std::vector<TokenRange> tokens;
        for (const auto& [begin, end] : ranges) tokens.push_back({begin, end});
        return skip_blocks(problem_of(problem), tokens, name.c_str());
      },
      nb::arg("problem"), nb::arg("ranges"), nb::arg("name"),
      "Words of the key blocks that lie in the ranges whole; `name` is for errors.");
}

}  // namespace tessera::python
