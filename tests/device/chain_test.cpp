// SPDX-License-Identifier: Apache-2.0
// Calls that follow each other in one CUDA graph, each reading what the one in front has written: kernels may begin
// before the one in front has ended, but not read before.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/graph.h"
#include "device/place.h"

namespace tessera::test {
namespace {

void exchange(Tensor& a, Tensor& b) {
  std::swap(a.data, b.data);
  std::swap(a.byte_offset, b.byte_offset);
}

class Chain : public OnPlace {
 protected:
  using Call = std::function<void(PlacedRun&, int index, Stream)>;

  /// How often a test repeats its calls: a GPU shows a race now and then, the CPU has none.
  [[nodiscard]] int times() const { return is_on_gpu(target_) ? 4 : 1; }

  /// The bytes of all tensors after `calls` calls of which each was waited for, and after all were one graph.
  void expect_same(const std::string& line, int calls, const Call& call) {
    SCOPED_TRACE(line);
    const Contents before = after(line, [](PlacedRun&) {});
    const Contents one_by_one = after(line, [&](PlacedRun& run) {
      for (int i = 0; i < calls; ++i) {
        call(run, i, run.stream());
        run.wait();
      }
    });
    ASSERT_FALSE(one_by_one == before) << "calls must write something";
    const Contents at_once = after(line, [&](PlacedRun& run) {
      Graph graph(target_, [&](Stream stream) {
        for (int i = 0; i < calls; ++i) call(run, i, stream);
      });
      graph.launch();
    });
    EXPECT_TRUE(at_once == one_by_one);
  }

 private:
  using Contents = std::vector<std::pair<Slot, std::vector<std::byte>>>;

  Contents after(const std::string& line, const std::function<void(PlacedRun&)>& work) {
    const cases::Case of = cases::Case::parse(line);
    cases::Inputs inputs(of);
    Wishes wishes;
    wishes.splits = of.wishes.splits;
    PlacedRun run(inputs, make_plan(of.problem, target_, wishes));
    run.executor().prepare();
    run.upload();
    work(run);
    EXPECT_EQ(run.download(), "");
    Contents all;
    for (const auto& buffer : inputs.buffers()) {
      all.emplace_back(buffer.slot, std::vector<std::byte>(buffer.bytes.begin(), buffer.bytes.end()));
    }
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Places, Chain, every_place(), name_of_place);

TEST_P(Chain, DecodeStepsGoOnFromEachOthersStates) {
  for (const char* form : {"", " state=bf16", " layout=kv", " d=128", " d=128 state=bf16 layout=kv"}) {
    const std::string line = std::string("linear_decode b=6 h=8 slots=6 dtype=bf16 seed=85") + form;
    expect_same(line, 48, [](PlacedRun& run, int, Stream stream) { run.executor().run(run.bindings(), stream); });
  }
}

/// The output of a call is q of the next: the kernel of the splits, then the one that merges them, then again. The
/// scale makes a little difference in q a large one in o, and few calls leave it no time to be lost.
TEST_P(Chain, SplitsAreMergedBeforeTheNextCallReads) {
  for (const char* form : {"", " hkv=2", " d=128 kv=table page=16 lens_k=900,1,333"}) {
    const std::string line = std::string("attention b=3 sq=1 sk=1024 hq=8 dtype=bf16 splits=7 scale=2 seed=86") + form;
    for (int time = 0; time < times(); ++time) {
      expect_same(line, 3, [](PlacedRun& run, int index, Stream stream) {
        Bindings bindings = run.bindings();
        if (index % 2 == 1) exchange(bindings[Slot::q], bindings[Slot::o]);
        run.executor().run(bindings, stream);
      });
    }
  }
}

/// A call's O is the next one's Q, then K, then V, whose memory that one writes: by row tiles that are found before the
/// call in front has ended, and such as cannot be; more than there are multiprocessors, and some without keys.
TEST_P(Chain, RowTilesFoundEarlyReadAndWriteInTime) {
  for (const char* form : {" hq=4 b=2", " hq=4 b=2 d=128 causal", " hq=4 d=128", " hq=4 d=256", " hq=60 d=128 causal",
                           " hq=4 d=128 window=-250:*", " hq=4 b=2 d=128 lens_k=300,299 seqused_k causal",
                           " hq=4 b=2 layout=varlen tq=500 tk=500 lens_q=300,200 lens_k=300,200 causal",
                           " hq=4 d=128 list=indices block=64x64 density=1"}) {
    const std::string line = std::string("attention sq=300 sk=300 dtype=bf16 scale=2 seed=88") + form;
    for (int time = 0; time < times(); ++time) {
      expect_same(line, 6, [](PlacedRun& run, int index, Stream stream) {
        Bindings bindings = run.bindings();
        constexpr Slot read[3] = {Slot::q, Slot::k, Slot::v};
        for (int i = 0; i < index; ++i) exchange(bindings[Slot::o], bindings[read[i % 3]]);
        run.executor().run(bindings, stream);
      });
    }
  }
}

/// The first numbers of Q, which the call in front has written, are lengths too, which a GPU clamps: all keys where a
/// sign is plus, else none.
TEST_P(Chain, LengthsAreReadWhenTheCallInFrontHasWrittenThem) {
  if (target_.device == DeviceType::cpu) GTEST_SKIP() << "the CPU refuses such lengths";
  for (const char* form : {"", " d=128 causal"}) {
    const std::string line =
        std::string(
            "attention b=8 sq=300 sk=300 hq=2 dtype=bf16 seqused_k lens_k=300,300,300,300,300,300,300,300 seed=89") +
        form;
    for (int time = 0; time < times(); ++time) {
      expect_same(line, 4, [](PlacedRun& run, int index, Stream stream) {
        Bindings bindings = run.bindings();
        if (index % 2 == 1) exchange(bindings[Slot::o], bindings[Slot::q]);
        bindings[Slot::seqused_k].data = bindings[Slot::q].data;
        bindings[Slot::seqused_k].byte_offset = bindings[Slot::q].byte_offset;
        run.executor().run(bindings, stream);
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test
