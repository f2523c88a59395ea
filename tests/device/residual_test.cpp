// SPDX-License-Identifier: Apache-2.0
// The residual of O. The oracle's tolerance for inputs of 16 bits is wider than what the residual holds, so that O with
// its residual is compared with the O of fp32 that a plan with the same tiles computes. Both have the same sums, of
// which the oracle judges.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cpu/reference/number.h"
#include "device/place.h"
#include "device/placed_sequences.h"
#include "plan/implementations.h"

namespace tessera::test {
namespace {

class Residual : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, Residual, every_gpu(), name_of_place);

// P is rounded alike in equal tiles. Those of a list follow from its blocks.
std::string tiles_of(const Plan& plan) {
  const auto& state = plan.state();
  const std::string same = "splits=1 implementation=" + std::string(plan.implementation());
  if (plan.problem().list) return same;
  return same + " tile_q=" + std::to_string(state.tile_q) + " tile_kv=" + std::to_string(state.tile_kv);
}

TEST_P(Residual, RestoresWhatRoundingTook) {
  for (const char* form :
       {"sq=200 sk=300 hq=2 d=64", "sq=150 sk=300 hq=4 hkv=2 d=128 causal", "sq=70 hq=2 d=40", "sq=70 sk=90 d=96 dv=72",
        "sq=70 sk=300 d=256", "sq=90 sk=300 d=192 dv=160", "sq=30 sk=300 hq=8 hkv=1 d=32 inputs=scale:8",
        "b=2 sq=90 sk=300 d=128 kv=table page=16", "sq=300 d=64 list=indices block=64x64 density=0.5",
        "sq=100 sk=45 d=64 causal sink", "sq=90 sk=300 d=64 causal alibi", "b=3 sq=3 sk=400 hq=8 hkv=2 d=128",
        "b=3 sq=120 hq=4 hkv=2 d=64 layout=varlen tq=200 causal", "int8 sq=200 sk=300 hq=2 d=64",
        "int8 sq=100 sk=300 d=128 descale=block:64 smooth causal"}) {
    const bool int8 = std::string(form).rfind("int8 ", 0) == 0;
    for (const std::string dtype : {"bf16", "fp16"}) {
      const std::string line = "attention seed=31 lse " + std::string(form).substr(int8 ? 5 : 0);
      const std::string types = " dtype=" + (int8 ? "int8:int8" : dtype + ":" + dtype) + ":" + dtype + ":";
      SCOPED_TRACE(line + types + dtype);
      SequenceRun kept(line + types + dtype + " residual");
      ASSERT_NO_FATAL_FAILURE(run_on(target_, kept, ""));
      SequenceRun exact(line + types + "fp32");
      ASSERT_NO_FATAL_FAILURE(run_on(target_, exact, tiles_of(make_plan(kept.problem(), target_))));
      const DType rounded = kept.problem().o_type;
      for (std::int64_t b = 0; b < kept.problem().batch; ++b) {
        const std::vector<double> outs = kept.query_rows(Slot::o, b);
        const std::vector<double> bytes = kept.query_rows(Slot::o_residual, b);
        const std::vector<double> want = exact.query_rows(Slot::o, b);
        ASSERT_EQ(outs.size(), want.size());
        ASSERT_EQ(bytes.size(), want.size());
        for (std::size_t i = 0; i < want.size(); ++i) {
          // Half a step, and a few roundings in fp32 where the compiler chose other instructions.
          const double allowed = reference::residual_step(rounded, outs[i]) / 2 + std::ldexp(std::abs(want[i]), -21);
          ASSERT_NEAR(reference::with_residual(rounded, outs[i], bytes[i]), want[i], allowed)
              << "element " << i << " of sequence " << b;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test
