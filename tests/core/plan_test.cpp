// SPDX-License-Identifier: Apache-2.0
// Targets, wishes, the walk through the table of implementations, and the executor's workspace.
#include "tessera/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "call.h"
#include "expect_error.h"
#include "plan/implementations.h"

namespace tessera {
namespace {

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(Targets, TextNamesWhatAPlanNeeds) {
  EXPECT_EQ(Target::cpu(3, "avx2").to_string(), "cpu threads=3 isa=avx2");
  EXPECT_EQ(Target::cpu().to_string(), "cpu threads=auto isa=best");
  EXPECT_EQ(Target::cuda(90).to_string(), "cuda sm=90 shared_memory=232448");
  EXPECT_EQ(Target::cuda(80).shared_memory, 163 * 1024);
  EXPECT_EQ(Target::cuda(89).shared_memory, 99 * 1024);
  EXPECT_EQ(Target::cuda(120).shared_memory, 99 * 1024);
  Target emulated = Target::cuda(120);
  emulated.emulated = true;
  emulated.multiprocessors = 132;
  EXPECT_EQ(emulated.to_string(), "cuda sm=120 shared_memory=101376 multiprocessors=132 emulated");
  EXPECT_FALSE(emulated == Target::cuda(120));
}

TEST(WishesText, RoundTrips) {
  for (const char* text : {"", "tile_q=64", "implementation=cpu.tiled tile_q=64 tile_kv=128 splits=2", "splits=7",
                           "tile_q=128 stages=2 warps=4 loader=tma_warp"}) {
    const Wishes wishes = Wishes::parse(text);
    EXPECT_EQ(wishes.to_string(), text);
    EXPECT_TRUE(Wishes::parse(wishes.to_string()) == wishes);
  }
  expect_error([] { Wishes::parse("tile_q=0"); }, ErrorCode::parse, "tile_q");
  expect_error([] { Wishes::parse("splits=-1"); }, ErrorCode::parse, "splits");
  expect_error([] { Wishes::parse("tile_kv=wide"); }, ErrorCode::parse, "tile_kv");
  expect_error([] { Wishes::parse("tiles=4"); }, ErrorCode::parse, "tiles");
  expect_error([] { Wishes::parse("tile_q=4 tile_q=4"); }, ErrorCode::parse, "tile_q");
}

// A kernel's tile, ring and loader may be wished for; what no kernel can be is refused with the numbers.
TEST(WishesText, OfTheGpuForward) {
  const Problem problem = Problem::parse("attention sq=4096 hq=8 d=128 dtype=bf16 causal");
  const auto plan = [&](const std::string& wishes, int sm) {
    return make_plan(problem, Target::cuda(sm), Wishes::parse("implementation=cuda.fwd_mma " + wishes));
  };
  EXPECT_NE(plan("tile_q=64 tile_kv=32 stages=3", 90).explain().find("tile=64x32 stages=3"), std::string::npos);
  EXPECT_NE(plan("tile_q=256 warps=8", 90).explain().find("tile=256x64 stages=2 warps=8"), std::string::npos);
  EXPECT_NE(plan("loader=tma", 90).explain().find("stages=2 loader=tma\n"), std::string::npos);
  for (const int sm : {90, 100, 120}) {
    const std::string text = plan("loader=tma_warp", sm).explain();
    EXPECT_TRUE(contains(text, " stages=") && contains(text, " loader=tma_warp\n  shared") &&
                contains(text, "a block of 256 threads"))
        << text;
  }
  const auto refusal = [&](const char* wishes, int sm) {
    try {
      plan(wishes, sm);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  EXPECT_NE(refusal("loader=tma", 80).find("loader is tma; that wants SM90"), std::string::npos);
  EXPECT_NE(refusal("loader=tma_warp", 89).find("loader is tma_warp; that wants SM90"), std::string::npos);
  EXPECT_NE(refusal("loader=tma_warp tile_q=64 warps=2", 90).find("tma_warp with warps=2; want 4 or 8"),
            std::string::npos);
  EXPECT_NE(refusal("loader=fast", 90).find("loader is fast; want cp_async, tma or tma_warp"), std::string::npos);
  EXPECT_NE(refusal("stages=4", 89).find("needs 164864 bytes of shared memory; the target has 101376"),
            std::string::npos);
  EXPECT_NE(refusal("tile_kv=128", 90).find("needs 256 registers a thread"), std::string::npos);
  EXPECT_NE(refusal("tile_kv=40", 90).find("tile_kv is 40; want a multiple of 16"), std::string::npos);
  EXPECT_NE(refusal("warps=3", 90).find("warps is 3"), std::string::npos);
  EXPECT_NE(refusal("tile_q=4096", 90).find("tile_q is 4096; want 16 or 32 rows a warp"), std::string::npos);
  EXPECT_THROW(make_plan(problem, Target::cpu(), Wishes::parse("stages=2")), Error);
}

// Of more than 256 columns of V two blocks take half each; what a block keeps of 512 fits every chip.
TEST(WishesText, OfTheGpuForwardAtWideHeadDims) {
  const Problem problem = Problem::parse("attention sq=4096 hq=8 d=512 dtype=bf16 causal");
  const auto explain = [&](const char* wishes, int sm) {
    try {
      return make_plan(problem, Target::cuda(sm), Wishes::parse(wishes)).explain();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_TRUE(contains(explain("", 90), "d=512:2x256 tile=64x32")) << explain("", 90);
  EXPECT_TRUE(contains(explain("", 90), "shared memory: 115712 bytes")) << explain("", 90);
  EXPECT_TRUE(contains(explain("", 80), "d=512:2x256 tile=64x32"));
  EXPECT_TRUE(contains(explain("", 89), "d=512:2x256 tile=64x16"));
  EXPECT_TRUE(contains(explain("", 120), "shared memory: 91136 bytes"));
  EXPECT_TRUE(contains(explain("loader=tma", 90), "loader is tma; that wants")) << explain("loader=tma", 90);
  EXPECT_TRUE(contains(explain("stages=2", 89), "needs 115712 bytes of shared memory; the target has 101376"));
  EXPECT_TRUE(contains(explain("tile_q=128", 90), "needs 288 registers a thread"));
}

TEST(MakePlan, GpusMoveSkipStatesOnByWholeRowsOfTheList) {
  const auto problem = [](const std::string& what) {
    return Problem::parse("attention sq=512 dtype=bf16 list=bitmask " + what);
  };
  for (const int sm : {80, 89, 90, 120}) {
    for (const char* d : {"64", "96", "128", "192", "256"}) {
      for (const char* rule : {"mass", "threshold"}) {
        const Plan plan = make_plan(problem("block=128x128 d=" + std::string(d) + " skip=" + rule), Target::cuda(sm));
        EXPECT_EQ(plan.implementation(), sm == 90 ? "cuda.fwd_wgmma" : "cuda.fwd_mma");
        EXPECT_TRUE(contains(plan.explain(), "tile=128x")) << plan.explain();
      }
    }
    const auto refused = [&](const std::string& what, const std::string& reason) {
      const Support support = supports(problem(what), Target::cuda(sm));
      EXPECT_FALSE(support.ok) << what;
      EXPECT_TRUE(contains(support.reason, reason)) << support.reason;
      EXPECT_EQ(make_plan(problem(what)).implementation(), "cpu.tiled");
    };
    refused("block=128x128 skip=mass:own:2", "mass:own is the CPU's");
    refused("block=128x128 d=512 skip=mass", "for head dims up to 256");
    refused("block=256x128 skip=threshold", "block_q is 256 and a tile has 128 rows");
    refused("block=16x128 skip=threshold", "block_q is 16");
    refused("block=128x100 skip=mass", "block_kv is 100");
  }
}

TEST(MakePlan, ResolvesThreadsAndInstructionSet) {
  const Plan plan = make_plan(Problem::parse("attention sq=64 hq=4"));
  EXPECT_EQ(plan.implementation(), "cpu.tiled");
  EXPECT_GT(plan.target().threads, 0);
  EXPECT_EQ(plan.target().isa, cpu_isas().front());
  EXPECT_EQ(plan.problem().seqlen_q, 64);
  const Plan one = make_plan(Problem::parse("attention sq=64 hq=4"), Target::cpu(1, cpu_isas().back()));
  EXPECT_EQ(one.target().threads, 1);
  EXPECT_EQ(one.target().isa, cpu_isas().back());
}

TEST(MakePlan, IsAPureFunction) {
  const Problem problem = Problem::parse("attention b=2 sq=300 hq=4 hkv=2 causal dtype=bf16");
  const Plan a = make_plan(problem, Target::cpu(2));
  const Plan b = make_plan(problem, Target::cpu(2));
  EXPECT_EQ(a.explain(), b.explain());
  EXPECT_EQ(a.workspace_bytes(), b.workspace_bytes());
}

TEST(MakePlan, EveryOperationHasAnImplementation) {
  EXPECT_EQ(make_plan(Problem::parse("combine sq=8")).implementation(), "cpu.combine");
  EXPECT_EQ(make_plan(Problem::parse("kv_append sq=8 sk=64")).implementation(), "cpu.kv_append");
  EXPECT_EQ(make_plan(Problem::parse("linear_decode h=4 d=128")).implementation(), "cpu.linear_decode");
  EXPECT_EQ(make_plan(Problem::parse("linear_chunk t=300 h=4 d=128")).implementation(), "cpu.linear_chunk");
  EXPECT_EQ(make_plan(Problem::parse("linear_chunk pass=backward t=9 slots=1")).implementation(), "cpu.linear_chunk");
  EXPECT_EQ(make_plan(Problem::parse("attention pass=backward sq=8")).implementation(), "cpu.tiled");
}

TEST(MakePlan, TheReferenceIsTakenByNameOnly) {
  const Problem problem = Problem::parse("attention sq=8");
  EXPECT_EQ(make_plan(problem, Target::cpu(), Wishes::parse("implementation=cpu.reference")).implementation(),
            "cpu.reference");
  const Plan plan = make_plan(problem);
  ASSERT_EQ(plan.candidates().size(), detail::implementations().size());
  const auto refused = std::find_if(plan.candidates().begin(), plan.candidates().end(),
                                    [](const Candidate& each) { return each.name == "cpu.reference"; });
  ASSERT_NE(refused, plan.candidates().end());
  EXPECT_TRUE(contains(refused->support.reason, "only on request"));
}

TEST(MakePlan, ExplainSaysWhatAndWhyNot) {
  const Plan plan = make_plan(Problem::parse("attention sq=200 hq=2"), Target::cpu(2));
  const std::string text = plan.explain();
  for (const char* part : {"attention sq=200 hq=2", "cpu threads=2", "cpu.tiled", "workspace:", " bytes",
                           "tiles:", "splits:", "refused:", "cpu.combine: ", "cpu.kv_append: ", "cpu.linear_decode: ",
                           "cpu.linear_chunk: ", "cpu.reference: only on request"}) {
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  }
  EXPECT_TRUE(contains(text, "promises:       the same bits in every run\n")) << text;
  const Plan invariant = make_plan(Problem::parse("attention sq=200 hq=2 batch_invariant"), Target::cpu(2));
  EXPECT_TRUE(contains(invariant.explain(), "in every run, and whatever shares the batch\n")) << invariant.explain();
  const Plan wished =
      make_plan(Problem::parse("attention sq=200"), Target::cpu(1), Wishes::parse("implementation=cpu.reference"));
  EXPECT_TRUE(contains(wished.explain(), "wishes:         implementation=cpu.reference"));
  EXPECT_TRUE(contains(wished.explain(), "cpu.tiled: the wish is implementation=cpu.reference"));
}

void expect_unsupported(const char* line, const Target& target, const char* wishes, std::string_view reason) {
  SCOPED_TRACE(line);
  const Problem problem = Problem::parse(line);
  const Support support = supports(problem, target, Wishes::parse(wishes));
  EXPECT_FALSE(support);
  EXPECT_TRUE(contains(support.reason, reason)) << support.reason;
  try {
    make_plan(problem, target, Wishes::parse(wishes));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
    EXPECT_TRUE(contains(error.what(), reason)) << error.what();
  }
}

TEST(MakePlan, RefusalsGiveTheReason) {
  expect_unsupported("attention sq=8", Target::cuda(90), "", "wants q, k and v of one type, bf16 or fp16");
  expect_unsupported("attention sq=8", Target::cpu(), "implementation=cpu.fast",
                     "there is no implementation of this name");
  expect_unsupported("attention sq=8", Target::cpu(), "implementation=cpu.combine", "cpu.combine: ");
  expect_unsupported("attention sq=8 dtype=int8:int8:e5m2:bf16", Target::cuda(90), "",
                     "wants v in bf16 or fp16 beside int8");
  expect_unsupported("attention sq=8 dtype=int8:int8:bf16:bf16 d=40", Target::cuda(80), "",
                     "wants head dims of 8 bits that are multiples of 16");
  expect_unsupported("quantize sq=8", Target::cuda(75), "", "wants SM80 or newer");
  expect_unsupported("attention pass=backward sq=8 kv=table page=4", Target::cpu(), "", "paged keys");
  expect_unsupported("attention pass=backward sq=8 kv2=csr sk2=4 page2=4", Target::cpu(), "", "paged keys");
  expect_unsupported("attention pass=backward sq=8 mass=mean", Target::cpu(), "", "neither tile mass");
  expect_unsupported("attention sq=8", Target::cpu(1, "sse9"), "", "sse9");
}

/// What make_plan says to a problem that it refuses.
std::string refusal(const char* line, const Target& target, const char* wishes = "") {
  try {
    make_plan(Problem::parse(line), target, Wishes::parse(wishes));
  } catch (const Error& error) {
    return error.want();
  }
  ADD_FAILURE() << line << " is planned";
  return "";
}

TEST(MakePlan, RefusalsNameTheRowsOfThatDeviceAndOperationAndWhatWouldDo) {
  EXPECT_EQ(
      refusal("attention sq=8", Target::cuda(90)),
      "what an implementation there supports (cuda.fwd_wgmma, cuda.fwd_decode, cuda.fwd_mma: wants q, k and v of one "
      "type, bf16 or fp16); cpu.tiled takes it on the CPU");
  EXPECT_EQ(
      refusal("attention pass=backward sq=8", Target::cuda(80)),
      "what an implementation there supports (cuda.bwd_wgmma, cuda.bwd_mma: wants q, k and v of one type, bf16 or "
      "fp16); cpu.tiled takes it on the CPU");
  EXPECT_EQ(refusal("combine sq=8 dv=64 dtype=e4m3:e4m3:e4m3:bf16", Target::cpu()),
            "what an implementation there supports (cpu.combine: has no e4m3; want fp32, fp16 or bf16)");
  EXPECT_EQ(refusal("attention sq=8", Target::cpu(), "splits=2000"),
            "what an implementation there supports (cpu.tiled: splits is 2000; want 1 to 1024); without the wishes "
            "cpu.tiled takes it");
  EXPECT_EQ(
      refusal("attention sq=8", Target::cpu(), "implementation=cpu.combine"),
      "what an implementation there supports (cpu.combine: does combine only); without the wishes cpu.tiled takes "
      "it");
  EXPECT_EQ(refusal("attention sq=8", Target::cpu(), "implementation=cpu.fast"),
            "what an implementation there supports (cpu.fast: there is no implementation of this name); without the "
            "wishes cpu.tiled takes it");
}

TEST(MakePlan, BadArgumentsAreErrorsOfTheirOwn) {
  const Problem problem = Problem::parse("attention sq=8");
  expect_error([&] { make_plan(problem, Target::cpu(-1)); }, ErrorCode::invalid_argument, "threads");
  expect_error([&] { make_plan(problem, Target::cpu(1 << 20)); }, ErrorCode::invalid_argument, "threads");
  EXPECT_FALSE(supports(problem, Target::cpu(-1)));
  Wishes wishes;
  wishes.tile_kv = -4;
  expect_error([&] { make_plan(problem, Target::cpu(), wishes); }, ErrorCode::invalid_argument, "tile_kv");
  Problem broken = problem;
  broken.heads_q = 0;
  expect_error([&] { make_plan(broken); }, ErrorCode::invalid_argument, "heads_q");
  expect_error([&] { (void)supports(broken); }, ErrorCode::invalid_argument, "heads_q");
  EXPECT_TRUE(supports(problem));
}

const char* const kLine = "attention sq=300 sk=300 hq=2 dtype=bf16 causal";

// A packed sequence cannot be longer than its tensor, however generous the longest length is.
TEST(Workspace, OfPackedSequencesIsBoundedByTokens) {
  const auto bytes = [](const std::string& line, const char* wishes) {
    return make_plan(Problem::parse(line), Target::cpu(8), Wishes::parse(wishes)).workspace_bytes();
  };
  for (const char* wishes : {"", "splits=3"}) {
    for (const char* pass : {"", " pass=backward"}) {
      const std::string rest = std::string(" layout=varlen tq=5 tk=7 hq=16 hkv=1 d=512") + pass;
      EXPECT_EQ(bytes("attention sq=70368744177664 sk=70368744177664" + rest, wishes),
                bytes("attention sq=5 sk=7" + rest, wishes))
          << rest << wishes;
    }
  }
  for (const char* rest : {" tq=5 varlen h=2 d=64", " tq=5 varlen h=2 d=64 pass=backward"}) {
    EXPECT_EQ(bytes("linear_chunk t=281474976710656" + std::string(rest), ""),
              bytes("linear_chunk t=5" + std::string(rest), ""))
        << rest;
  }
  const std::string packed = "attention pass=backward b=64 layout=varlen tq=64 tk=64 hq=16 hkv=1 d=512 sq=";
  EXPECT_LT(bytes(packed + "1048576 sk=1048576", "splits=3"), 200U << 20U);
}

TEST(Workspace, ThatDoesNotFitIsRefused) {
  const auto refuse = [](const char* line, int threads, const char* wishes = "") {
    const Problem problem = Problem::parse(line);
    expect_error([&] { make_plan(problem, Target::cpu(threads), Wishes::parse(wishes)); }, ErrorCode::overflow,
                 "workspace");
  };
  // The dQ of one thread fits, those of all do not; likewise parts, and masses of a row's blocks.
  refuse("attention pass=backward sq=70368744177664 hq=16 hkv=1 d=512", 8);
  refuse("attention pass=backward sq=281474976710656 sk=1 hq=256 hkv=1 d=8", 1024);
  refuse("attention pass=backward sq=70368744177664 hq=16 hkv=1 d=512", 1, "splits=64");
  refuse("attention sq=70368744177664 hq=16 hkv=1 d=512", 1, "splits=1024");
  refuse("attention sq=1 sk=140737488355328 block=1x1 mass=mean", 4096);
  // A thread's dQ fits, and with the three values of each row it does not.
  refuse("attention pass=backward sq=253327479039590 sk=1 hq=512 hkv=1 d=8", 1);
}

TEST(Executors, TakeTheCallersWorkspace) {
  const Plan plan = make_plan(Problem::parse(kLine), Target::cpu(2));
  const std::size_t bytes = plan.workspace_bytes();
  ASSERT_GT(bytes, 0U);
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, (bytes + 191) / 64 * 64), &std::free);
  auto* base = static_cast<std::byte*>(memory.get());
  Executor executor(plan, base, bytes);
  Call call(kLine);
  EXPECT_NO_THROW(executor.run(call.bindings));
  executor.use(base + 64, bytes);
  EXPECT_NO_THROW(executor.run(call.bindings));
  expect_error([&] { executor.use(base, bytes - 1); }, ErrorCode::invalid_argument, "workspace");
  expect_error([&] { Executor(plan).use(base, bytes); }, ErrorCode::invalid_argument, "workspace");
  expect_error([&] { Executor(plan, base, bytes - 1); }, ErrorCode::invalid_argument, "workspace");
  expect_error([&] { Executor(plan, nullptr, bytes); }, ErrorCode::invalid_argument, "workspace");
  for (const int shift : {8, 32}) {
    expect_error([&] { Executor(plan, base + shift, bytes); }, ErrorCode::invalid_argument, "workspace");
  }
}

TEST(Executors, Move) {
  Call call(kLine);
  Executor first(make_plan(call.problem, Target::cpu(1)));
  Executor second(std::move(first));
  EXPECT_NO_THROW(second.run(call.bindings));
  // A moved-from executor says so instead of running without its workspace.
  expect_error([&] { first.run(call.bindings); }, ErrorCode::invalid_argument,
               "executor");  // NOLINT(bugprone-use-after-move)
  first = std::move(second);
  EXPECT_NO_THROW(first.run(call.bindings));
  EXPECT_EQ(first.plan().implementation(), "cpu.tiled");
}

}  // namespace
}  // namespace tessera
