// SPDX-License-Identifier: Apache-2.0
// How much a problem has to do: multiply-adds of its visible (query, key) pairs, and the bytes that must move once.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/suite.h"
#include "cases/inputs/slot_shapes.h"
#include "tessera/problem.h"

namespace tessera::cli {

/// Tiles that a list keeps, for one (batch, head): query blocks × key blocks, row-major. Empty: no list.
using KeptTiles = std::vector<bool>;

/// Keys [first, second) that row `row` of a sequence may see by window, compressed causal and chunks, with default
/// offsets.
std::pair<std::int64_t, std::int64_t> visible_keys(const Problem& problem, std::int64_t row);

/// The length of packed sequences that share `total` tokens equally, each at most `longest`.
std::int64_t equal_length(std::int64_t batch, std::int64_t longest, std::int64_t total);

struct Work {
  double flops = 0;
  double bytes = 0;
};

/// Sequences are taken at their full length, packed ones as sharing their tokens equally, unless the line has each
/// one's; mask callables as showing everything.
/// `kept` holds one entry for each row of the list in (batch, head) order, repeated as the list is shared; empty
/// without one.
Work work_of(const BenchCase& bench_case, const std::vector<KeptTiles>& kept);

}  // namespace tessera::cli
