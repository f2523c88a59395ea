// SPDX-License-Identifier: Apache-2.0
// Whether a run's outputs are right. The rule, for each output tensor on its own:
//
//   max |got − oracle|  ≤  2 · max |plain − oracle|  +  2 · ulp(max |oracle|)
//
// over the elements that the oracle writes, where oracle is the double-precision reference, plain the same-dtype
// reference (reference.h), and ulp(x) the spacing of the output's dtype at x. Where the oracle is NaN or infinite, got
// must be the same NaN or infinity, and nowhere else. Elements that the oracle leaves alone must keep their bits
// (Inputs::find_damage). Counts, indices and bits must be equal, except that a tile may be in or out of the next list
// when the oracle's mass is within the mass's own tolerance of the threshold.
#pragma once

#include <string>

#include "cpu/reference.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cases {

/// Spacing of the floating dtype's numbers at `magnitude`.
double ulp(DType dtype, double magnitude) noexcept;

struct Comparison {
  bool passed = true;
  std::string failure;     // "dq: element 17 (0, 2, 1): got …, oracle …, error … > tolerance …"
  double worst_ratio = 0;  // largest error / tolerance of the outputs
};

Comparison compare(const Problem& problem, const Bindings& got, const reference::Result& oracle,
                   const reference::Result& plain);

}  // namespace tessera::cases
