// SPDX-License-Identifier: Apache-2.0
// rounding=stochastic: without decay a step of one token has the same fp32 states everywhere, and so the same bits.
#include <gtest/gtest.h>

#include <vector>

#include "device/place.h"

namespace tessera::test {
namespace {

class StateRounding : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, StateRounding, every_place(), name_of_place);

/// `later`: added to the offset, wherever that is bound.
std::vector<std::byte> states_of(cases::Inputs& inputs, const Plan& plan, std::uint64_t later = 0) {
  inputs.restore();
  inputs.bindings().offset += later;
  if (const Tensor& offset = inputs.bindings()[Slot::dropout_offset]; offset) *offset.as<std::uint64_t>() += later;
  PlacedRun run(inputs, plan);
  EXPECT_EQ(run.run(), "");
  for (const auto& buffer : inputs.buffers()) {
    if (buffer.slot == Slot::state) return {buffer.bytes.begin(), buffer.bytes.end()};
  }
  return {};
}

TEST_P(StateRounding, HasTheBitsOfTheCpu) {
  for (const char* form : {"", " layout=kv", " d=128 dv=64 drop_scalars", " d=128 dv=96 layout=kv slot_ids=int64",
                           " ring=1 ring_cursors=1,0,3", " ring=1 ring_cursors=1,0,3 layout=kv"}) {
    const cases::Case one = cases::Case::parse(
        "linear_decode b=3 h=3 dtype=bf16 state=bf16 rounding=stochastic slots=7 slopes=zero seed=91 "
        "drop_seed=81985529216486895 drop_offset=18364758544493064720" +
        std::string(std::string_view(form).find("d=128") == std::string_view::npos ? " d=64" : "") + form);
    SCOPED_TRACE(form);
    cases::Inputs inputs(one);
    inputs.remember();
    const std::vector<std::byte> here = states_of(inputs, make_plan(one.problem, target_));
    EXPECT_TRUE(here == states_of(inputs, make_plan(one.problem, Target::cpu(1))));
    EXPECT_FALSE(here == states_of(inputs, make_plan(one.problem, Target::cpu(1)), 1));
  }
}

}  // namespace
}  // namespace tessera::test
