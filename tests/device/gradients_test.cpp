// SPDX-License-Identifier: Apache-2.0
// Gradients where inputs hold what the case files' do not.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "device/place.h"
#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

class Gradients : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, Gradients, every_place(), name_of_place);

// A softcap makes finite scores of an infinite query, whose products with what is hidden are NaN.
TEST_P(Gradients, KeysBehindTheLastHaveNone) {
  for (const char* shape : {"d=64 dtype=bf16", "d=96 dtype=fp16", "d=128 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    SequenceRun run(std::string("attention pass=backward sq=128 sk=128 hq=1 softcap=5 seqused_k lens_k=100 seed=21 ") +
                    shape);
    std::vector<double> row = run.query_row(Slot::q, 0, 7, 0);
    row[0] = std::numeric_limits<double>::infinity();
    run.set_query_row(Slot::q, 0, 7, 0, row);
    run.remember();
    run.inputs().restore();
    PlacedRun placed(run.inputs(), make_plan(run.problem(), target_));
    ASSERT_EQ(placed.run(), "");
    for (std::int64_t j = run.key_length(0); j < 128; ++j) {
      for (const Slot slot : {Slot::dk, Slot::dv}) {
        for (const double x : run.key_row(slot, 0, j, 0)) ASSERT_EQ(x, 0) << "key " << j;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test
