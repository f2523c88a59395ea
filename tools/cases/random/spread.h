// SPDX-License-Identifier: Apache-2.0
// A part of many cases or kernels that still has everything that any of them has, for checks too slow to run on all.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cases/line/case.h"

namespace tessera::cases {

/// Indices of entries that together have every word of all entries. Taken is, again and again, the entry with the most
/// words that none of the taken has; of several the first.
std::set<std::size_t> cover(std::vector<std::vector<std::string>> words_of_entries);

/// Indices of cases that together have, for each operation and pass, every feature (features.h) and every
/// key=value of their lines. Of numbers only these differ: 0, multiples of 16, others; sizes and seeds are new in
/// nearly every line.
std::set<std::size_t> spread_of(std::span<const Case> cases);

}  // namespace tessera::cases
