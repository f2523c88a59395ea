// SPDX-License-Identifier: Apache-2.0
// Problems given sequence by sequence, run where the tests run, and compared bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "device/place.h"
#include "ops/sequence_run.h"

namespace tessera::test {

/// Runs by the plan that `wishes` give; what is computed is finite.
inline void run_on(const Target& target, SequenceRun& run, const std::string& wishes) {
  run.inputs().restore();
  PlacedRun placed(run.inputs(), make_plan(run.problem(), target, Wishes::parse(wishes)));
  ASSERT_EQ(placed.run(), "");
  // Two runs that write nothing are equal too.
  for (std::int64_t b = 0; b < run.problem().batch; ++b) {
    const std::vector<double> rows = run.query_rows(Slot::o, b);
    ASSERT_TRUE(std::all_of(rows.begin(), rows.end(), [](double x) { return std::isfinite(x); })) << "o of " << b;
  }
}

/// Every output row of sequence b of `one` and of sequence `other_b` of `other`.
inline void expect_same(const SequenceRun& one, std::int64_t b, const SequenceRun& other, std::int64_t other_b) {
  ASSERT_EQ(one.query_length(b), other.query_length(other_b));
  EXPECT_TRUE(same_bits(one.query_rows(Slot::o, b), other.query_rows(Slot::o, other_b))) << "o of sequence " << b;
  EXPECT_TRUE(same_bits(one.lse_rows(b), other.lse_rows(other_b))) << "lse of sequence " << b;
}

}  // namespace tessera::test
