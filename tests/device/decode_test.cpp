// SPDX-License-Identifier: Apache-2.0
// Splits that the last block of a row merges: counters in the workspace, whose content is anything at first, lead from
// one run to the next.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "device/place.h"

namespace tessera::test {
namespace {

class MergedSplits : public OnPlace {
 protected:
  static std::vector<std::byte> bytes_of(cases::Inputs& inputs, Slot slot) {
    for (const auto& buffer : inputs.buffers()) {
      if (buffer.slot == slot) return {buffer.bytes.begin(), buffer.bytes.end()};
    }
    return {};
  }

  /// Runs `line` many times in one workspace: each run is right and has the bits of the first.
  void expect_same_runs(const std::string& line, const std::string& wishes) {
    const cases::Case of = cases::Case::parse(line);
    cases::Inputs inputs(of);
    const Plan plan = make_plan(of.problem, target_, Wishes::parse("implementation=cuda.fwd_decode " + wishes));
    PlacedRun run(inputs, plan);
    const reference::Result oracle = reference::compute(of.problem, inputs.bindings(), reference::Arithmetic::oracle);
    ASSERT_EQ(run.run(), "");
    ASSERT_EQ(judge(of.problem, inputs.bindings(), oracle), "");
    const std::vector<std::byte> o = bytes_of(inputs, Slot::o);
    const std::vector<std::byte> lse = bytes_of(inputs, Slot::lse);
    ASSERT_FALSE(o.empty() || lse.empty());
    for (int time = 0; time < 20; ++time) {
      for (int again = 0; again <= time % 3; ++again) run.start();
      run.wait();
      ASSERT_EQ(run.download(), "");
      ASSERT_TRUE(bytes_of(inputs, Slot::o) == o && bytes_of(inputs, Slot::lse) == lse) << "time " << time;
      inputs.restore();
      if (time % 4 == 3) run.upload();  // the workspace too
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Places, MergedSplits, every_gpu(), name_of_place);

TEST_P(MergedSplits, EveryRunHasTheBitsOfTheFirst) {
  const std::string pages =
      "attention b=3 sq=2 sk=300 hq=8 hkv=2 d=64 dtype=bf16 kv=table page=16 pages=shuffled causal "
      "lens_k=300,17,131 lse seed=4";
  for (const char* wishes : {"splits=2", "splits=5", "splits=9 warps=2", "splits=40 stages=2"}) {
    SCOPED_TRACE(wishes);
    ASSERT_NO_FATAL_FAILURE(expect_same_runs(pages, wishes));
    ASSERT_NO_FATAL_FAILURE(expect_same_runs(
        "attention b=2 sq=7 sk=700 hq=6 hkv=1 d=128 dv=64 dtype=fp16:fp16:fp16:fp32 sink lse seed=5", wishes));
  }
}

// Rows that no sequence has, whose blocks count all the same, and sequences without keys.
TEST_P(MergedSplits, RowsThatAreNotThereCountToo) {
  ASSERT_NO_FATAL_FAILURE(
      expect_same_runs("attention b=4 sq=20 sk=200 layout=varlen kv=varlen lens_q=1,0,20,3 lens_k=200,90,0,33 hq=4 "
                       "hkv=2 d=32 dtype=bf16 "
                       "causal lse seed=6",
                       "splits=4"));
}

}  // namespace
}  // namespace tessera::test
