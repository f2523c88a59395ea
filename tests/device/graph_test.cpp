// SPDX-License-Identifier: Apache-2.0
// Graphs captured once and launched with other lengths, page tables, lists and positions in the same buffers: each
// launch must be right for what the buffers then hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cpu/reference/number.h"
#include "device/graph.h"
#include "device/place.h"

namespace tessera::test {
namespace {

/// Splits mean the same everywhere; tiles in a case are the CPU's.
Plan plan_on(const Target& target, const cases::Case& of) {
  Wishes wishes = of.wishes;
  if (is_on_gpu(target)) {
    wishes = {};
    wishes.splits = of.wishes.splits;
  }
  return make_plan(of.problem, target, wishes);
}

/// `to` holds what `from` does, a case of the same problem. A list with fewer entries than `to` has room for fills the
/// beginnings of its rows.
void adopt(cases::Inputs& from, cases::Inputs& to) {
  const auto sources = from.buffers();
  const auto places = to.buffers();
  ASSERT_EQ(sources.size(), places.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    ASSERT_EQ(sources[i].slot, places[i].slot);
    if (sources[i].bytes.size() == places[i].bytes.size()) {
      std::copy(sources[i].bytes.begin(), sources[i].bytes.end(), places[i].bytes.begin());
      continue;
    }
    const Tensor& source = from.bindings()[sources[i].slot];
    const Tensor& place = to.bindings()[places[i].slot];
    const auto last = static_cast<std::size_t>(place.rank - 1);
    ASSERT_EQ(place.dtype, DType::int32) << to_string(places[i].slot);
    ASSERT_LE(source.shape[last], place.shape[last]) << to_string(places[i].slot) << ": no room in the first case's";
    std::fill(places[i].bytes.begin(), places[i].bytes.end(), std::byte{0xFF});
    reference::for_each_element(source, [&](std::int64_t index, std::int64_t offset) {
      const std::int64_t row = index / source.shape[last];
      reference::write(place, row * place.shape[last] + index % source.shape[last], reference::read(source, offset));
    });
  }
  to.remember();
}

/// As if nothing had been written.
reference::Result untouched(reference::Result result) {
  for (reference::Output& output : result.outputs) std::fill(output.written.begin(), output.written.end(), 0);
  return result;
}

class GraphReplay : public OnPlace {
 protected:
  /// Captures `problem` with the first of `values`, then launches with each and once more from the last to the first.
  void expect_replays(const std::string& problem, const std::vector<std::string>& values) {
    const cases::Case first = cases::Case::parse(problem + " " + values.front());
    cases::Inputs inputs(first);
    PlacedRun run(inputs, plan_on(target_, first));
    run.executor().prepare();
    run.upload();
    Graph graph(target_, [&](Stream stream) { run.executor().run(run.bindings(), stream); });
    EXPECT_EQ(run.download(), "");
    const reference::Result nothing =
        untouched(reference::compute(first.problem, inputs.bindings(), reference::Arithmetic::oracle));
    EXPECT_EQ(inputs.find_damage(nothing), "") << "a capture must compute nothing";
    std::vector<std::string> launches = values;
    launches.insert(launches.end(), values.rbegin(), values.rend());
    for (const std::string& one : launches) {
      SCOPED_TRACE(problem + " " + one);
      const cases::Case now = cases::Case::parse(problem + " " + one);
      ASSERT_EQ(now.problem, first.problem);
      cases::Inputs fresh(now);
      ASSERT_NO_FATAL_FAILURE(adopt(fresh, inputs));
      const auto oracle = reference::compute(now.problem, inputs.bindings(), reference::Arithmetic::oracle);
      const auto plain = plain_before(now.problem, inputs.bindings());
      run.upload();
      graph.launch();
      EXPECT_EQ(run.download(), "");
      EXPECT_EQ(judge(now.problem, inputs.bindings(), oracle, plain), "");
      EXPECT_EQ(inputs.find_damage(oracle), "");
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Places, GraphReplay, every_place(), name_of_place);

TEST_P(GraphReplay, PagedDecodeWithSplits) {
  expect_replays("attention b=3 sq=1 sk=700 hq=8 hkv=2 d=128 dtype=bf16 kv=table page=16 pages=140 lse splits=4",
                 {"lens_k=700,650,699 seed=41", "lens_k=1,0,16 pages=shuffled seed=42",
                  "lens_k=333,700,17 pages=shuffled seed=43", "lens_k=0,0,0 seed=44"});
  expect_replays(
      "attention b=2 sq=5 sk=300 hq=4 hkv=1 d=64 dtype=fp16 kv=table page=7 pages=90 seqused_q causal lse sink "
      "splits=3",
      {"lens_q=5,5 lens_k=300,299 seed=45", "lens_q=0,3 lens_k=44,300 pages=shuffled seed=46",
       "lens_q=1,5 lens_k=2,128 pages=shuffled seed=47"});
}

TEST_P(GraphReplay, CompressedPageTables) {
  expect_replays("attention b=3 sq=20 sk=200 hq=4 hkv=2 d=96 dtype=bf16 kv=csr page=8 pages=80 seqused_q causal lse",
                 {"lens_q=20,20,20 lens_k=200,200,200 seed=48", "lens_q=1,20,7 lens_k=1,0,99 pages=shuffled seed=49",
                  "lens_q=20,0,13 lens_k=128,64,200 pages=shuffled seed=50"});
}

TEST_P(GraphReplay, PackedSequences) {
  // One that fits the loader of narrow heads and one of wide ones.
  for (const char* dims : {"d=64", "d=128"}) {
    expect_replays(
        "attention b=3 sq=200 sk=260 layout=varlen tq=300 tk=400 hq=4 hkv=2 dtype=bf16 causal lse " + std::string(dims),
        {"lens_q=200,60,40 lens_k=260,100,40 seed=51", "lens_q=0,200,100 lens_k=0,260,140 seed=52",
         "lens_q=1,1,1 lens_k=260,1,0 seed=53", "lens_q=100,100,100 lens_k=133,134,133 seed=54"});
  }
}

TEST_P(GraphReplay, Gradients) {
  for (const char* words : {"d=64", "d=128 sink deterministic", "d=192 dv=128"}) {
    expect_replays(
        "attention pass=backward b=3 sq=200 sk=260 layout=varlen tq=300 tk=400 hq=4 hkv=2 dtype=bf16 causal " +
            std::string(words),
        {"lens_q=200,60,40 lens_k=260,100,40 seed=90", "lens_q=0,200,100 lens_k=0,260,140 seed=91",
         "lens_q=1,1,1 lens_k=260,1,0 seed=92"});
  }
  expect_replays("attention pass=backward b=2 sq=70 sk=150 hq=2 d=64 dtype=bf16 seqused_k window=40:3 dropout=0.25",
                 {"lens_k=150,90 q_offset=80,20 k_offset=0,0 drop_scalars drop_seed=3 drop_offset=4 seed=93",
                  "lens_k=0,150 q_offset=-5,100 k_offset=10,-7 drop_scalars drop_seed=18446744073709551615 "
                  "drop_offset=12884901893 seed=94"});
}

TEST_P(GraphReplay, NativeSparseAttention) {
  for (const char* words : {"", "project", "pass=backward project"}) {
    expect_replays(
        "nsa_pool b=3 sk=200 hkv=2 d=64 dtype=bf16 kv=varlen tk=330 length=32 stride=16 " + std::string(words),
        {"lens_k=200,0,127 seed=61", "lens_k=31,32,33 seed=62", "lens_k=0,0,0 seed=63"});
  }
  expect_replays(
      "nsa_select b=3 sq=200 sk=200 hq=4 hkv=2 d=64 dtype=bf16 layout=varlen tq=330 tk=330 length=16 tile=32 top=5 "
      "causal",
      {"lens_q=200,0,127 lens_k=200,0,127 seed=64", "lens_q=16,100,17 lens_k=16,100,17 seed=65"});
  expect_replays(
      "nsa_select b=2 sq=300 hq=4 hkv=2 d=64 dtype=bf16 length=8 tile=16 top=6 compressed_top=4 compressed_block=4 "
      "causal",
      {"seed=71", "seed=72"});
  expect_replays("nsa_select b=2 sq=1 sk=300 hq=4 hkv=2 d=64 dtype=fp16 length=8 tile=32 top=9 causal",
                 {"q_offset=288,32 seed=66", "q_offset=0,256 seed=67"});
  for (const char* pass : {"", "pass=backward "}) {
    expect_replays("nsa_gate " + std::string(pass) + "b=3 sq=100 hq=3 d=64 dtype=bf16 layout=varlen tq=170",
                   {"lens_q=100,0,65 seed=68", "lens_q=1,2,3 seed=69", "lens_q=0,0,0 seed=70"});
  }
}

TEST_P(GraphReplay, PositionsAndDropoutsSeed) {
  expect_replays("attention b=2 sq=70 sk=150 hq=2 d=64 dtype=bf16 seqused_k window=40:3 alibi dropout=0.25 lse",
                 {"lens_k=150,90 q_offset=80,20 k_offset=0,0 drop_scalars drop_seed=3 drop_offset=4 seed=55",
                  "lens_k=0,150 q_offset=-5,100 k_offset=10,-7 drop_scalars drop_seed=18446744073709551615 "
                  "drop_offset=12884901893 "
                  "seed=56",
                  "lens_k=77,128 q_offset=0,5000000000 k_offset=3,4999999950 drop_scalars drop_seed=7 seed=57"});
}

TEST_P(GraphReplay, TwoSegments) {
  expect_replays(
      "attention b=2 sq=60 sk=100 hq=4 hkv=2 d=64 dtype=bf16 kv=table page=16 pages=20 kv2=table sk2=70 page2=16 "
      "pages2=12 lse",
      {"lens_k=100,100 lens_k2=70,70 seed=58", "lens_k=0,33 lens_k2=70,0 pages=shuffled seed=59",
       "lens_k=64,5 lens_k2=1,16 pages=shuffled seed=60"});
  expect_replays(
      "attention b=2 sq=60 sk=100 hq=4 hkv=2 d=128 dtype=bf16 kv=table page=16 pages=20 kv2=varlen sk2=70 tk2=120 "
      "causal lse",
      {"lens_k=100,100 lens_k2=70,50 seed=80", "lens_k=0,33 lens_k2=70,0 pages=shuffled seed=81",
       "lens_k=64,5 lens_k2=1,16 pages=shuffled seed=82"});
}

TEST_P(GraphReplay, WideHeads) {
  expect_replays("attention b=2 sq=40 sk=200 hq=4 hkv=2 d=512 dtype=bf16 kv=table page=16 pages=30 causal lse",
                 {"lens_k=200,150 seed=83", "lens_k=0,33 pages=shuffled seed=84", "lens_k=77,200 seed=85"});
}

TEST_P(GraphReplay, Lists) {
  const std::string problem = "attention b=2 sq=150 sk=300 hq=4 hkv=2 d=64 dtype=bf16 seqused_k lse ";
  const std::vector<std::string> values = {"density=1 lens_k=300,300 seed=61", "density=0.3 lens_k=300,150 seed=62",
                                           "density=0 lens_k=300,300 seed=63", "density=0.7 lens_k=31,299 seed=64"};
  for (const char* list : {"block=64x64 list=indices", "block=64x64 list=indices:kv causal",
                           "block=32x16 list=bitmask:q:b:full mask=document", "block=64x32 list=transposed:kv"}) {
    expect_replays(problem + list, values);
  }
}

TEST_P(GraphReplay, MassesAndNextLists) {
  const std::string problem =
      "attention b=2 sq=100 sk=200 hq=4 hkv=2 d=64 dtype=bf16 block=32x32 list=bitmask seqused_k causal lse ";
  const std::vector<std::string> values = {"density=0.8 lens_k=200,200 seed=65", "density=0.4 lens_k=50,200 seed=66",
                                           "density=1 lens_k=0,129 seed=67"};
  for (const char* outputs : {"mass=mean next=indices threshold=0.1", "mass=rms next=bitmask threshold=0.05"}) {
    expect_replays(problem + outputs, values);
  }
}

TEST_P(GraphReplay, CombineAndAppend) {
  expect_replays("combine b=2 sq=30 hq=4 dv=64 dtype=fp32:fp32:fp32:bf16 parts=3 lse sink", {"seed=68", "seed=69"});
  expect_replays(
      "kv_append b=2 sq=3 sk=90 hq=4 hkv=2 d=64 dtype=bf16 kv=table page=16 pages=14 rotary=half:64 rotate_q",
      {"lens_k=20,87 seed=70", "lens_k=0,15 pages=shuffled seed=71", "lens_k=47,1 pages=shuffled seed=72"});
}

TEST_P(GraphReplay, StepsOfLinearAttention) {
  for (const char* form : {"", " layout=kv state=bf16 t=3"}) {
    expect_replays(std::string("linear_decode b=3 h=2 d=64 dtype=bf16 slots=8") + form,
                   {"state_slots=1,4,7 dest_slots=1,4,7 seed=74", "state_slots=-1,0,7 dest_slots=2,3,6 seed=75",
                    "state_slots=5,5,5 dest_slots=-1,2,4 slopes=zero seed=76"});
  }
}

TEST_P(GraphReplay, StepsWithARing) {
  for (const char* form : {"", " layout=kv state=bf16 t=3", " t=0"}) {
    expect_replays(std::string("linear_decode b=3 h=2 d=64 dtype=bf16 slots=8 ring=6") + form,
                   {"state_slots=1,4,7 ring_cursors=0,6,7 seed=87", "state_slots=-1,0,7 ring_cursors=3,13,6 seed=88",
                    "state_slots=5,2,0 ring_cursors=9,1,12 slopes=zero seed=89"});
  }
}

TEST_P(GraphReplay, SequencesOfLinearAttention) {
  const std::vector<std::string> slots = {"lens_q=100,33,0 state_slots=1,4,7 dest_slots=1,4,7 seed=77",
                                          "lens_q=1,64,70 state_slots=-1,0,7 dest_slots=2,3,6 slopes=zero seed=78"};
  expect_replays("linear_chunk b=3 t=100 h=2 d=64 dtype=bf16 varlen tq=150 slots=8", slots);
  expect_replays("linear_chunk pass=backward b=3 t=100 h=2 d=64 dtype=bf16 varlen tq=150 slots=8 layout=kv",
                 {"lens_q=100,33,0 state_slots=1,4,7 seed=79", "lens_q=1,64,70 state_slots=-1,0,7 seed=80"});
}

// One graph of two runs, the second of which reads what the first has written.
TEST_P(GraphReplay, AppendThenAttend) {
  const std::string cache = " b=3 sq=2 sk=400 hq=8 hkv=2 d=64 dtype=bf16 kv=table page=16 pages=78";
  const std::string append_line = "kv_append" + cache + " rotary=interleaved:64";
  const std::string attend_line = "attention" + cache + " causal lse splits=2";
  const cases::Case appending = cases::Case::parse(append_line + " lens_k=398,300,0 seed=73");
  const cases::Case attending = cases::Case::parse(attend_line + " lens_k=400,302,2 seed=73");
  cases::Inputs append(appending);
  cases::Inputs attend(attending);
  PlacedRun first(append, plan_on(target_, appending));
  PlacedRun second(attend, plan_on(target_, attending));
  Bindings host = attend.bindings();
  for (const Slot slot : {Slot::k, Slot::v, Slot::page_table}) {
    host[slot] = append.bindings()[slot];
    second.bindings()[slot] = first.bindings()[slot];
  }
  first.executor().prepare();
  second.executor().prepare();
  Graph graph(target_, [&](Stream stream) {
    first.executor().run(first.bindings(), stream);
    second.executor().run(second.bindings(), stream);
  });
  // The lengths before the append and after it.
  for (const auto& [before, after] : {std::pair("398,300,0", "400,302,2"), std::pair("0,15,31", "2,17,33"),
                                      std::pair("126,1,398", "128,3,400"), std::pair("398,300,0", "400,302,2")}) {
    SCOPED_TRACE(before);
    const std::string seed = std::string(" pages=shuffled seed=") + before[0] + "9";
    cases::Inputs fresh_append(cases::Case::parse(append_line + " lens_k=" + before + seed));
    cases::Inputs fresh_attend(cases::Case::parse(attend_line + " lens_k=" + after + seed));
    ASSERT_NO_FATAL_FAILURE(adopt(fresh_append, append));
    ASSERT_NO_FATAL_FAILURE(adopt(fresh_attend, attend));
    const auto cached = reference::compute(appending.problem, append.bindings(), reference::Arithmetic::oracle);
    first.upload();
    second.upload();
    graph.launch();
    EXPECT_EQ(first.download(), "");
    EXPECT_EQ(second.download(), "");
    EXPECT_EQ(judge(appending.problem, append.bindings(), cached), "");
    EXPECT_EQ(append.find_damage(cached), "");
    const auto attended = reference::compute(attending.problem, host, reference::Arithmetic::oracle);
    EXPECT_EQ(judge(attending.problem, host, attended), "");
    EXPECT_EQ(attend.find_damage(attended), "");
  }
}

class GraphCapture : public OnPlace {};
INSTANTIATE_TEST_SUITE_P(Places, GraphCapture, ::testing::Values("gpu"), name_of_place);

TEST_P(GraphCapture, RefusesWhatIsNotCompiledAndGoesOn) {
  // A configuration of no other test here, so that nothing has loaded its kernel.
  const cases::Case strange = cases::Case::parse(
      "attention sq=40 sk=90 hq=2 d=152 dv=40 dtype=fp16:fp16:fp16:fp32 compressed_causal=5:3 softcap=7 alibi");
  const cases::Case plain = cases::Case::parse("attention sq=40 sk=90 hq=2 d=64 dtype=bf16 lse seed=2");
  cases::Inputs strange_inputs(strange);
  cases::Inputs inputs(plain);
  PlacedRun cold(strange_inputs, make_plan(strange.problem, target_));
  PlacedRun warm(inputs, make_plan(plain.problem, target_));
  warm.executor().prepare();
  cold.upload();
  warm.upload();
  Capture capture(target_.index);
  try {
    cold.executor().run(cold.bindings(), capture.stream());
    ADD_FAILURE() << "captured a kernel that nobody has compiled";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "stream");
    EXPECT_NE(error.want().find("prepare()"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(capture.is_active()) << "the refusal must not end the caller's capture";
  // An error in the bindings does not either.
  Bindings wrong = warm.bindings();
  wrong[Slot::k].shape[1] += 1;
  EXPECT_THROW(warm.executor().run(wrong, capture.stream()), Error);
  EXPECT_TRUE(capture.is_active());
  warm.executor().run(warm.bindings(), capture.stream());
  ASSERT_TRUE(capture.is_active());
  const cuda::GraphExecHandle graph = capture.end();
  cuda::check(cuda::driver().graph_launch(graph, static_cast<cuda::StreamHandle>(warm.stream().handle)),
              "cuGraphLaunch");
  warm.wait();
  EXPECT_EQ(cuda::driver().graph_exec_destroy(graph), cuda::kSuccess);
  EXPECT_EQ(warm.download(), "");
  const auto oracle = reference::compute(plain.problem, inputs.bindings(), reference::Arithmetic::oracle);
  EXPECT_EQ(judge(plain.problem, inputs.bindings(), oracle), "");
  EXPECT_EQ(inputs.find_damage(oracle), "");
  // After a warm-up it can be captured.
  cold.executor().prepare();
  Graph later(target_, [&](Stream stream) { cold.executor().run(cold.bindings(), stream); });
  later.launch();
  EXPECT_EQ(cold.download(), "");
  const auto expected = reference::compute(strange.problem, strange_inputs.bindings(), reference::Arithmetic::oracle);
  EXPECT_EQ(judge(strange.problem, strange_inputs.bindings(), expected), "");
}

}  // namespace
}  // namespace tessera::test
