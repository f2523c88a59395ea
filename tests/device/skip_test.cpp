// SPDX-License-Identifier: Apache-2.0
// Skip states that live where a forward runs: steps as one graph, files, ranges, and the CPU's state beside a GPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "device/graph.h"
#include "device/place.h"
#include "tessera/skip_state.h"

namespace tessera::test {
namespace {

constexpr int kSteps = 10;

/// A problem's state and forward on one place.
class PlacedSteps {
 public:
  PlacedSteps(const std::string& line, const Target& target)
      : case_(cases::Case::parse(line)),
        inputs_(case_),
        run_(inputs_, make_plan(case_.problem, target)),
        state_(case_.problem, options(case_.problem),
               is_on_gpu(target) ? Device{DeviceType::cuda, target.index} : Device{}) {
    run_.executor().prepare();
    run_.upload();
  }

  SkipState& state() { return state_; }
  Stream stream() { return run_.stream(); }
  /// On a GPU without waiting for it.
  void step(std::int64_t index, Stream stream) {
    state_.bind(index, run_.bindings(), stream);
    run_.executor().run(run_.bindings(), stream);
  }
  void wait() { run_.wait(); }
  std::vector<std::byte> outputs() {
    EXPECT_EQ(run_.download(), "");
    for (const auto& buffer : inputs_.buffers()) {
      if (buffer.slot == Slot::o) return {buffer.bytes.begin(), buffer.bytes.end()};
    }
    return {};
  }

  static SkipOptions options(const Problem& problem) {
    const bool mass = problem.skip.kind == SkipRule::Kind::mass;
    return {.steps = kSteps, .warm_up = 1, .ramp = mass ? SkipOptions::Ramp{0.02F, 0.06F} : SkipOptions::Ramp{-1, 0}};
  }

 private:
  cases::Case case_;
  cases::Inputs inputs_;
  PlacedRun run_;
  SkipState state_;
};

const char* const kLines[] = {
    "attention sq=500 sk=2500 hq=2 d=64 dtype=bf16 block=64x64 list=bitmask skip=mass inputs=scale:2 seed=31",
    "attention sq=500 sk=2500 hq=2 d=64 dtype=bf16 block=64x64 list=bitmask skip=threshold inputs=scale:4 seed=32",
    "attention b=2 sq=400 sk=900 hq=4 hkv=2 d=128 dtype=bf16 causal block=128x128 list=bitmask skip=mass seed=33",
    "attention b=2 sq=400 sk=900 hq=4 hkv=2 d=128 dtype=bf16 causal block=128x128 list=bitmask skip=threshold seed=34",
};

class SkipOnPlace : public OnPlace {};

TEST_P(SkipOnPlace, TenStepsAsOneGraphAreTenCalls) {
  for (const char* line : kLines) {
    SCOPED_TRACE(line);
    PlacedSteps calls(line, target_);
    for (int step = 0; step < kSteps; ++step) {
      calls.step(step, calls.stream());
      calls.wait();
    }
    PlacedSteps captured(line, target_);
    Graph graph(target_, [&](Stream stream) {
      for (int step = 0; step < kSteps; ++step) captured.step(step, stream);
    });
    for (int launch = 0; launch < 2; ++launch) {  // step 0 begins anew
      graph.launch();
      EXPECT_EQ(captured.state().save(), calls.state().save()) << "launch " << launch;
    }
    EXPECT_EQ(captured.outputs(), calls.outputs());
    EXPECT_LT(calls.state().active(), 0.9);
    EXPECT_GT(calls.state().active(), 0.0);
  }
}

TEST_P(SkipOnPlace, IsSavedAndLoadedAnywhere) {
  for (const char* line : kLines) {
    SCOPED_TRACE(line);
    PlacedSteps steps(line, target_);
    for (int step = 0; step < 3; ++step) steps.step(step, steps.stream());
    steps.wait();
    const std::vector<std::byte> saved = steps.state().save();
    SkipState host(steps.state().problem(), steps.state().options());
    host.load(saved);
    EXPECT_EQ(host.save(), saved);
    EXPECT_EQ(host.active(), steps.state().active());
    PlacedSteps again(line, target_);
    again.state().load(saved);
    again.step(3, again.stream());
    steps.step(3, steps.stream());
    EXPECT_EQ(again.state().save(), steps.state().save());
  }
}

TEST_P(SkipOnPlace, RangesActFromTheNextStepOn) {
  for (const char* line : kLines) {
    SCOPED_TRACE(line);
    PlacedSteps steps(line, target_);
    steps.step(0, steps.stream());
    const std::vector<TokenRange> none;
    const std::vector<TokenRange> first{{0, 256}};
    const double all = steps.state().active();
    steps.state().set_ranges(none, first);
    const double left = steps.state().active();
    EXPECT_LT(left, all);
    steps.step(1, steps.stream());
    EXPECT_LE(steps.state().active(), left);
    steps.state().set_ranges(first, none);
    const double blocks = std::ceil(static_cast<double>(steps.state().problem().kv.seqlen) /
                                    static_cast<double>(steps.state().problem().block_kv));
    EXPECT_GE(steps.state().active(), 256.0 / static_cast<double>(steps.state().problem().block_kv) / blocks);
  }
}

TEST_P(SkipOnPlace, AFreshStateIsEveryTileWhateverCameBefore) {
  for (const char* line : kLines) {
    SCOPED_TRACE(line);
    PlacedSteps steps(line, target_);
    EXPECT_EQ(steps.state().active(), 1.0);
    for (int step = 0; step < 5; ++step) steps.step(step, steps.stream());
    steps.state().reset(steps.stream());
    EXPECT_EQ(steps.state().active(), 1.0);
  }
}

TEST_P(SkipOnPlace, ListsSettleWhereTheCpusDo) {
  for (const char* line : kLines) {
    SCOPED_TRACE(line);
    PlacedSteps here(line, target_);
    PlacedSteps cpu(line, Target::cpu(1));
    for (int step = 0; step < 6; ++step) {
      here.step(step, here.stream());
      cpu.step(step, {});
      EXPECT_NEAR(here.state().active(), cpu.state().active(), 0.01) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, SkipOnPlace, every_place(), name_of_place);

}  // namespace
}  // namespace tessera::test
