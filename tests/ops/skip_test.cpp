// SPDX-License-Identifier: Apache-2.0
// Skip states over several steps, each held against the oracle, and the defects that libraries with such lists have
// had: each test is named after one and would have found it (docs/skip-state.md).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "cases/compare.h"
#include "cpu/reference/reference.h"
#include "sequence_run.h"
#include "tessera/skip_state.h"

namespace tessera::test {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// A problem's state and runs of it on inputs that drift from step to step.
class Steps {
 public:
  Steps(const std::string& line, SkipOptions options)
      : line_(line), run_(line), state_(run_.problem(), std::move(options)) {}

  SkipState& state() { return state_; }
  SequenceRun& run() { return run_; }
  [[nodiscard]] const Bindings& got() { return run_.bindings(); }

  /// Runs a step and compares output, list and memory with the oracle's from the same state.
  void step(std::int64_t index) {
    drift(index);
    Bindings& bindings = run_.bindings();
    Bindings next;
    state_.bind(index, next);
    for (const Slot slot : kState) copy(next[slot], bindings[slot]);
    for (const Slot slot : {Slot::must_do_bits, Slot::must_skip_bits, Slot::skip_threshold, Slot::skip_step}) {
      bindings[slot] = next[slot];
    }
    run_.remember();
    const reference::Result oracle = reference::compute(run_.problem(), bindings, reference::Arithmetic::oracle);
    std::vector<reference::Result> plain;
    for (std::uint32_t order = 0; order < 4; ++order) {
      plain.push_back(reference::compute(run_.problem(), bindings, reference::Arithmetic::plain, order));
    }
    run_.run();
    const cases::Comparison comparison = cases::compare(run_.problem(), bindings, oracle, plain);
    EXPECT_TRUE(comparison.passed) << line_ << " step " << index << ": " << comparison.failure;
    EXPECT_EQ(run_.inputs().find_damage(oracle), "") << line_ << " step " << index;
    for (const Slot slot : kState) copy(bindings[slot], next[slot]);
  }

  [[nodiscard]] bool listed(std::int64_t head, std::int64_t query_block, std::int64_t key_block) {
    const Tensor& bits = got()[Slot::tile_bits];
    const std::int64_t at = head * bits.strides[1] + query_block * bits.strides[2] + key_block / 32;
    return (bits.as<std::uint32_t>()[at] >> (key_block % 32) & 1U) != 0;
  }

 private:
  static constexpr Slot kState[] = {Slot::tile_bits, Slot::skip_memory, Slot::skip_lse};

  static void copy(const Tensor& from, const Tensor& to) {
    if (!from) return;
    const std::size_t bytes = static_cast<std::size_t>(from.numel()) * size_of(from.dtype);
    if (bytes > 0) std::memcpy(to.bytes(), from.bytes(), bytes);
  }

  /// Queries turn a little, as they do from one diffusion step to the next.
  void drift(std::int64_t index) {
    SequenceRun other(line_ + " seed=" + std::to_string(100 + index));
    for (std::int64_t b = 0; b < run_.problem().batch; ++b) {
      for (std::int64_t h = 0; h < run_.problem().heads_q; ++h) {
        for (std::int64_t i = 0; i < run_.query_length(b); ++i) {
          std::vector<double> row = run_.query_row(Slot::q, b, i, h);
          const std::vector<double> fresh = other.query_row(Slot::q, b, i, h);
          for (std::size_t c = 0; c < row.size(); ++c) row[c] = 0.9 * row[c] + 0.4 * fresh[c];
          run_.set_query_row(Slot::q, b, i, h, row);
        }
      }
    }
  }

  std::string line_;
  SequenceRun run_;
  SkipState state_;
};

TEST(SkipSteps, FollowTheOracleThroughARun) {
  for (const char* shape :
       {"sq=70 sk=90 hq=2 d=16 block=16x16", "b=2 sq=70 sk=90 hq=4 hkv=2 d=16 causal block=17x5 lse",
        "sq=40 sk=300 hq=2 d=16 block=8x4", "sq=90 sk=40 hq=2 d=16 causal block=16x16",
        "b=3 sq=50 layout=varlen lens_q=50,13,0 lens_k=50,0,29 sk=50 tq=70 hq=2 d=16 block=8x16",
        "sq=200 sk=260 hq=2 d=64 dtype=bf16 block=64x64"}) {
    for (const char* rule : {"mass", "mass:own:3", "threshold"}) {
      const std::string line = std::string("attention list=bitmask skip=") + rule + " " + shape;
      const bool mass = rule != std::string("threshold");
      SkipOptions options{.steps = 8, .warm_up = 2, .ramp = {0.05F, 0.3F}, .heads = {{1, {0.01F, 0.1F}}}};
      if (!mass) options = {.steps = 8, .warm_up = 2, .ramp = {-2, 0}, .heads = {{1, {-3, -0.5F}}}};
      Steps run(line, options);
      for (std::int64_t i = 0; i < 8; ++i) {
        if (i == 5) {
          const std::vector<TokenRange> done{{0, run.state().problem().block_kv}};
          run.state().set_ranges(done, {});
        }
        run.step(i);
        if (i == 0 && mass) {
          EXPECT_EQ(run.state().active(), 1.0) << line << ": the first step knows no mass";
        }
      }
      EXPECT_LT(run.state().active(), 1.0) << line << ": nothing was ever left out";
      EXPECT_GT(run.state().active(), 0.0) << line;
    }
  }
}

// LiteAttention's lists were made for the host's tile sizes and read with the kernel's: 176 and 128 keys.
TEST(SkipDefects, HostAndKernelOfDifferentTileSizes) {
  for (const char* rule : {"mass", "threshold"}) {
    const std::string line =
        std::string("attention sq=100 sk=300 hq=2 d=16 block=32x24 list=bitmask seed=8 skip=") + rule;
    std::vector<std::uint32_t> lists[3];
    const char* wishes[] = {"", " tile_q=16 tile_kv=16", " tile_q=64 tile_kv=176"};
    for (std::size_t i = 0; i < 3; ++i) {
      SequenceRun run(line + wishes[i]);
      run.run();
      const Tensor& bits = run.bindings()[Slot::tile_bits];
      lists[i].assign(bits.as<std::uint32_t>(), bits.as<std::uint32_t>() + bits.numel());
    }
    EXPECT_EQ(lists[0], lists[1]) << rule;
    EXPECT_EQ(lists[0], lists[2]) << rule;
  }
}

// BackLite's backward read the first word of its lists only, and 32 entries at most.
TEST(SkipDefects, ListsOfSeveralWords) {
  Steps run("attention sq=16 sk=2400 hq=1 d=16 block=16x2 list=bitmask skip=mass",
            {.steps = 3, .warm_up = 0, .ramp = {0.0012F, 0.0012F}});
  run.step(0);
  run.step(1);
  bool left_out[38] = {}, kept[38] = {};
  for (std::int64_t kb = 0; kb < 1200; ++kb) {
    bool* const words = run.listed(0, 0, kb) ? kept : left_out;
    words[kb / 32] = true;
  }
  for (int word = 0; word < 38; ++word) EXPECT_TRUE(left_out[word] && kept[word]) << word;
  run.step(2);  // whose output the oracle checks under that list
}

/// A list with every hole: tile t of head 0 is listed where bit t of `pattern` is set.
void list_pattern(SequenceRun& run, std::uint32_t pattern) {
  const Tensor& bits = run.bindings()[Slot::tile_bits];
  std::fill_n(bits.as<std::uint32_t>(), bits.numel(), pattern);
}

// LiteAttention dropped the first block of each range when it walked backwards, and left the last range open.
TEST(SkipDefects, HolesAndEndsOfRangesSurviveAWalkInEitherDirection) {
  for (const std::int32_t step : {0, 1, 2, 3}) {
    for (const std::uint32_t pattern : {0b1U, 0b10000000U, 0b10101010U, 0b01010101U, 0b11001001U, 0b10111101U}) {
      SequenceRun run("attention sq=40 sk=120 hq=1 d=16 block=8x16 list=bitmask skip=threshold seed=3");
      list_pattern(run, pattern);
      *run.bindings()[Slot::skip_step].as<std::int32_t>() = step;
      *run.bindings()[Slot::skip_threshold].as<float>() = kNothing;  // keeps all that is computed
      run.remember();
      run.run();
      for (std::int64_t row = 0; row < 5; ++row) {
        EXPECT_EQ(run.bindings()[Slot::tile_bits].as<std::uint32_t>()[row], pattern) << step << " row " << row;
      }
    }
  }
}

/// All queries are one unit vector; scores of the keys of block t are `scores[t]`.
void set_scores(SequenceRun& run, const std::vector<double>& scores) {
  const Problem& p = run.problem();
  for (std::int64_t i = 0; i < p.seqlen_q; ++i) {
    std::vector<double> q(16, 0);
    q[0] = 1;
    run.set_query_row(Slot::q, 0, i, 0, q);
  }
  for (std::int64_t j = 0; j < p.kv.seqlen; ++j) {
    std::vector<double> k(16, 0);
    k[0] = scores[static_cast<std::size_t>(j / p.block_kv)] * 4;  // the scale is 1/4
    run.set_key_row(Slot::k, 0, j, 0, k);
  }
}

// LiteAttention's second direction began at the wrong end: what it keeps differs by direction.
TEST(SkipDefects, DirectionOfTheWalkDecidesWhatIsCompared) {
  const auto next_list = [](std::int32_t step) {
    SequenceRun run("attention sq=8 sk=56 hq=1 d=16 block=8x16 list=bitmask skip=threshold");
    set_scores(run, {0, 3, 1, 5});
    list_pattern(run, 0b1111);
    *run.bindings()[Slot::skip_step].as<std::int32_t>() = step;
    *run.bindings()[Slot::skip_threshold].as<float>() = -1;
    run.remember();
    run.run();
    return *run.bindings()[Slot::tile_bits].as<std::uint32_t>();
  };
  EXPECT_EQ(next_list(0), 0b1011U);  // up: 1 is two below 3
  EXPECT_EQ(next_list(1), 0b1000U);  // down: all are far below 5
  EXPECT_EQ(next_list(6), 0b1011U);
}

// A threshold on the running maximum keeps what it saw first; the first tile of a walk is never left out.
TEST(SkipDefects, TheFirstTileOfAWalkIsKept) {
  for (const std::int32_t step : {0, 1}) {
    SequenceRun run("attention sq=8 sk=56 hq=1 d=16 block=8x16 list=bitmask skip=threshold");
    set_scores(run, {2, 2, 2, 2});
    list_pattern(run, 0b0110);
    *run.bindings()[Slot::skip_step].as<std::int32_t>() = step;
    *run.bindings()[Slot::skip_threshold].as<float>() = 0;
    run.remember();
    run.run();
    EXPECT_EQ(*run.bindings()[Slot::tile_bits].as<std::uint32_t>(), step == 0 ? 0b0010U : 0b0100U);
  }
}

// A list of LiteAttention's can only shrink: what matters again stays lost.
TEST(SkipDefects, ATileThatWasLeftOutComesBack) {
  SequenceRun run("attention sq=32 sk=96 hq=1 d=16 block=32x32 list=bitmask skip=mass:prior:2 seed=5");
  const Tensor& codes = run.bindings()[Slot::skip_memory];
  list_pattern(run, 0b011);
  codes.as<std::uint8_t>()[2] = 150;
  *run.bindings()[Slot::skip_threshold].as<float>() = (155.0F - 239) / 8;
  int steps = 0;
  while ((*run.bindings()[Slot::tile_bits].as<std::uint32_t>() & 0b100U) == 0 && steps < 10) {
    run.remember();
    run.run();
    ++steps;
  }
  EXPECT_EQ(steps, 3);  // 150, 152, 154, 156
  EXPECT_EQ(codes.as<std::uint8_t>()[2], 156);
}

// LiteAttention ignored must_do on some chips, and took must_skip when a list began only.
TEST(SkipDefects, MustDoAndMustSkipActFromTheStepTheyAreGivenIn) {
  for (const char* rule : {"mass", "threshold"}) {
    const bool mass = rule == std::string("mass");
    Steps run(std::string("attention sq=32 sk=300 hq=1 d=16 block=16x32 list=bitmask skip=") + rule,
              {.steps = 9, .warm_up = 0, .ramp = mass ? SkipOptions::Ramp{3.0F, 3.0F} : SkipOptions::Ramp{0, 0}});
    run.step(0);
    run.step(1);
    run.step(2);
    EXPECT_LT(run.state().active(), 0.9) << rule;
    const double before = run.state().active();
    const std::vector<TokenRange> done{{256, 300}}, skipped{{0, 256}};
    run.state().set_ranges(done, {});
    EXPECT_GE(run.state().active(), 0.2) << rule;
    run.step(3);  // the oracle has these keys in the output
    run.state().set_ranges(done, skipped);
    EXPECT_DOUBLE_EQ(run.state().active(), 0.2) << rule;
    run.step(4);
    run.state().set_ranges({}, {});
    run.step(5);
    if (!mass) {
      EXPECT_LE(run.state().active(), before + 0.2) << "a cleared bit came back";
    }
  }
}

// Conditional and unconditional calls overwrote each other's list.
TEST(SkipDefects, TwoStreamsKeepApart) {
  const std::string line = "attention sq=64 sk=128 hq=1 d=16 block=16x16 list=bitmask skip=mass";
  const SkipOptions options{.steps = 5, .warm_up = 1, .ramp = {0.05F, 0.2F}};
  Steps one(line, options), alone(line, options), other(line + " inputs=rising", options);
  for (std::int64_t i = 0; i < 5; ++i) {
    one.step(i);
    other.step(i);
    alone.step(i);
  }
  EXPECT_EQ(one.state().save(), alone.state().save());
  EXPECT_NE(one.state().save(), other.state().save());
}

// A NaN compares as smaller than everything: no tile may be lost by it.
TEST(SkipDefects, ANanDropsNoTile) {
  for (const char* rule : {"mass", "threshold"}) {
    SequenceRun run(std::string("attention sq=32 sk=96 hq=1 d=16 block=1x16 list=bitmask seed=7 skip=") + rule);
    list_pattern(run, 0b101101);
    *run.bindings()[Slot::skip_threshold].as<float>() = rule == std::string("mass") ? 1.9F : 0.0F;
    std::vector<double> row = run.query_row(Slot::q, 0, 20, 0);
    row[3] = std::numeric_limits<double>::quiet_NaN();
    run.set_query_row(Slot::q, 0, 20, 0, row);
    run.remember();
    run.run();
    const auto* bits = run.bindings()[Slot::tile_bits].as<std::uint32_t>();
    EXPECT_NE(bits[19], 0b101101U) << rule;
    EXPECT_EQ(bits[20], 0b101101U) << rule;
  }
}

TEST(SkipSteps, NothingDependsOnThreadsOrOnWhatSharesTheBatch) {
  for (const char* rule : {"mass", "threshold"}) {
    const std::string line =
        std::string("attention b=3 sq=100 sk=130 hq=4 hkv=2 d=32 causal block=16x16 list=bitmask seed=4 skip=") + rule;
    SequenceRun one(line), many(line);
    one.run(1);
    many.run(4);
    for (const Slot slot : {Slot::tile_bits, Slot::skip_memory, Slot::skip_lse, Slot::o}) {
      const Tensor &a = one.bindings()[slot], &b = many.bindings()[slot];
      if (!a) continue;
      const std::size_t bytes = static_cast<std::size_t>(a.numel()) * size_of(a.dtype);
      EXPECT_EQ(std::memcmp(a.bytes(), b.bytes(), bytes), 0) << rule << " " << to_string(slot);
    }
  }
}

}  // namespace
}  // namespace tessera::test
