// SPDX-License-Identifier: Apache-2.0
// Inputs for a measurement: values from N(0, 1), sequences at full length, pages in random order, random tile lists.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/suite.h"
#include "bench/work.h"
#include "cases/inputs/slot_shapes.h"

namespace tessera::cli {

struct BenchInputs {
  Arrays arrays;                // inputs and outputs; a backward's o and lse are still to be computed
  std::vector<KeptTiles> kept;  // of the list the pass walks; empty without one
  // linear_decode with more states than sequences: state_slots of one call after another, disjoint until they begin
  // again, so that no call finds its states in a cache. The first is in `arrays`.
  std::vector<files::Array> slots_by_call;
  // With a ring: ring_cursor of those calls.
  std::vector<files::Array> cursors;
};

BenchInputs make_inputs(const BenchCase& bench_case, std::uint64_t seed);

}  // namespace tessera::cli
