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

// Query 7 has an infinity. A softcap makes finite scores of it, whose products with what is hidden are NaN.
class InfiniteQueryRun : public SequenceRun {
 public:
  explicit InfiniteQueryRun(const std::string& line)
      : SequenceRun("attention pass=backward sq=128 sk=128 hq=1 softcap=5 seed=21 " + line) {
    std::vector<double> row = query_row(Slot::q, 0, 7, 0);
    row[0] = std::numeric_limits<double>::infinity();
    set_query_row(Slot::q, 0, 7, 0, row);
    remember();
    inputs().restore();
  }
};

TEST_P(Gradients, KeysBehindTheLastHaveNone) {
  for (const char* shape : {"d=64 dtype=bf16", "d=96 dtype=fp16", "d=128 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    InfiniteQueryRun run(std::string("seqused_k lens_k=100 ") + shape);
    PlacedRun placed(run.inputs(), make_plan(run.problem(), target_));
    ASSERT_EQ(placed.run(), "");
    for (std::int64_t j = run.key_length(0); j < 128; ++j) {
      for (const Slot slot : {Slot::dk, Slot::dv}) {
        for (const double x : run.key_row(slot, 0, j, 0)) ASSERT_EQ(x, 0) << "key " << j;
      }
    }
  }
}

TEST_P(Gradients, KeysHiddenFromAnInfiniteQueryAreFinite) {
  for (const char* shape : {"d=64 dtype=bf16", "d=64 dtype=bf16 score=soft_clip", "d=64 dtype=bf16 dropout=0.25",
                            "d=64 dtype=bf16 sink", "d=96 dtype=fp16", "d=128 dtype=bf16", "d=192 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    InfiniteQueryRun run(std::string("causal ") + shape);
    PlacedRun placed(run.inputs(), make_plan(run.problem(), target_));
    ASSERT_EQ(placed.run(), "");
    for (std::int64_t j = 8; j < 128; ++j) {
      for (const Slot slot : {Slot::dk, Slot::dv}) {
        for (const double x : run.key_row(slot, 0, j, 0)) ASSERT_TRUE(std::isfinite(x)) << "key " << j;
      }
    }
  }
}

// Scores of −∞ weigh nothing; what a kernel puts in the place of the infinity must not weigh either.
TEST_P(Gradients, AnInfiniteKeyIsNotTakenForAFiniteOne) {
  for (const char* shape : {"d=64 dtype=bf16", "d=96 dtype=fp16", "d=128 dtype=bf16", "d=192 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    SequenceRun run(std::string("attention pass=backward sq=384 sk=128 hq=1 seed=22 ") + shape);
    for (std::int64_t i = 0; i < run.query_length(0); ++i) {
      std::vector<double> row = run.query_row(Slot::q, 0, i, 0);
      row[0] = -1;
      run.set_query_row(Slot::q, 0, i, 0, row);
    }
    std::vector<double> key = run.key_row(Slot::k, 0, 3, 0);
    key[0] = std::numeric_limits<double>::infinity();
    run.set_key_row(Slot::k, 0, 3, 0, key);
    run.remember();
    run.inputs().restore();
    PlacedRun placed(run.inputs(), make_plan(run.problem(), target_));
    ASSERT_EQ(placed.run(), "");
    for (const double x : run.key_row(Slot::dv, 0, 3, 0)) ASSERT_TRUE(x == 0 || std::isnan(x)) << x;
  }
}

}  // namespace
}  // namespace tessera::test
