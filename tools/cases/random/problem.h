// SPDX-License-Identifier: Apache-2.0
// Random cases over every feature, small enough that thousands run in a minute.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/line/case.h"
#include "cases/random/draw.h"

namespace tessera::cases {

/// Case `index` of the sequence that `seed` begins; `isas` are those to choose from.
Case random_case(std::uint64_t seed, std::uint64_t index, const std::vector<std::string>& isas,
                 const RandomScope& scope = {});
/// The same for a GPU: half types, forwards, lengths of several of its tiles, and runs of 64 problems whose kernels are
/// alike, so that compiling them takes little of the time.
Case random_gpu_case(std::uint64_t seed, std::uint64_t index, const RandomScope& scope = {});

/// The same plan with other values: of any operation other inputs, of attention other lengths too, each at most what it
/// was. Nothing is compiled anew for it.
void redraw_values(Case& problem, std::uint64_t seed, std::uint64_t index);

}  // namespace tessera::cases
