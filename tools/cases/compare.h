// SPDX-License-Identifier: Apache-2.0
// Whether a run's outputs are right. The rule, for each output tensor on its own:
//
//   max |got − oracle|  ≤  2 · max |plain − oracle|  +  2 · ulp(max |oracle|)
//
// over the elements that the oracle writes, where oracle is the double-precision reference, plain the same-dtype
// reference (reference.h), and ulp(x) the spacing of the output's dtype at x. Where the oracle is NaN or infinite, got
// must be the same NaN or infinity, and nowhere else; a finite oracle beyond the dtype's range may come as infinity,
// and one of which plain is not finite, since it rounds P, dP or dS beyond that range, as any value that is not finite.
// How far off a finite one may be there, runs of plain behind the first tell, which round without that bound.
// o_residual is judged with the o beside it: their sum is got, O before its rounding is oracle and plain, and ulp(x) is
// half a step of the residual. Elements that the oracle leaves alone must keep their bits (Inputs::find_damage).
// Counts, indices and bits must be equal, except that a tile may be in or out of the next list when the oracle's mass
// is within the mass's own tolerance of the threshold. A skip state's memory may be any code of a mass within
// tolerance; its list must be what the memory that was written says.
//
// The error of plain is a random quantity, and one run is one draw of it: an output of few elements may by luck have
// none. plain's error is therefore the largest of kPlainRuns runs that differ in nothing but rounding (`order` of
// reference::compute). As it can only grow with the runs, they are made only when a comparison fails without (Trial).
// docs/testing.md derives the number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/reference/reference.h"
#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cases {

inline constexpr std::uint32_t kPlainRuns = 256;

/// Spacing of the floating dtype's numbers at `magnitude`.
double ulp(DType dtype, double magnitude) noexcept;

/// In which arithmetic plain is what a plan's results are judged by: that of products of 8 bits where it has these.
reference::Arithmetic plain_arithmetic(const Plan& plan);

struct Comparison {
  bool passed = true;
  std::string failure;     // "dq: element 17 (0, 2, 1): got …, oracle …, error … > tolerance …"
  double worst_ratio = 0;  // largest error / tolerance of the outputs
  bool mirrored = true;    // whether the first run of plain keeps to the rule with its error and got's exchanged
};

Comparison compare(const Problem& problem, const Bindings& got, const reference::Result& oracle,
                   const std::vector<reference::Result>& plain);

/// Whether more than `runs` of plain may let a comparison pass that failed with a worst_ratio of `ratio`.
bool rounding_may_explain(double ratio, std::size_t runs) noexcept;

}  // namespace tessera::cases
