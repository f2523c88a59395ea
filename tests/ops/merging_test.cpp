// SPDX-License-Identifier: Apache-2.0
// Parts of the keys computed apart and merged give the whole, within rounding.
#include <gtest/gtest.h>

#include <memory>

#include "ops/sequence_run.h"
#include "tessera/attention.h"

namespace tessera::test {
namespace {

constexpr double kTolerance = 2e-6;  // fp32, outputs of order 1

/// Attention over keys [first, end) of `whole`, at their positions.
std::unique_ptr<SequenceRun> part_of(const SequenceRun& whole, const std::string& common, std::int64_t first,
                                     std::int64_t end) {
  auto made = std::make_unique<SequenceRun>("attention sk=" + std::to_string(end - first) +
                                            " k_offset=" + std::to_string(first) + common);
  SequenceRun& part = *made;
  const auto same = [](std::int64_t b, std::int64_t h) { return Source{b, h}; };
  part.copy_inputs(whole, same, same);
  for (std::int64_t b = 0; b < part.problem().batch; ++b) {
    for (std::int64_t j = first; j < end; ++j) {
      for (std::int64_t h = 0; h < part.problem().heads_kv; ++h) {
        for (const Slot slot : {Slot::k, Slot::v}) {
          part.set_key_row(slot, b, j - first, h, whole.key_row(slot, b, j, h));
        }
      }
    }
  }
  part.remember();
  part.run();
  return made;
}

std::string common_line(const char* mask) {
  // q_offset is that of the whole, sk − sq.
  return std::string(" b=2 sq=40 hq=4 hkv=2 d=32 lse seed=1 q_offset=60 ") + mask;
}

TEST(Merging, TwoPartsOfTheKeysAreTheWhole) {
  for (const char* mask : {"", "causal", "window=20:3", "alibi", "mask=document"}) {
    SequenceRun whole("attention sk=100" + common_line(mask));
    whole.run();
    for (const std::int64_t cut : {0, 1, 50, 64, 99, 100}) {
      const auto left = part_of(whole, common_line(mask), 0, cut);
      const auto right = part_of(whole, common_line(mask), cut, 100);
      merge_states(left->bindings()[Slot::o], left->bindings()[Slot::lse], right->bindings()[Slot::o],
                   right->bindings()[Slot::lse], left->bindings()[Slot::o], left->bindings()[Slot::lse]);
      for (std::int64_t b = 0; b < 2; ++b) {
        EXPECT_LT(largest_difference(whole.query_rows(Slot::o, b), left->query_rows(Slot::o, b)), kTolerance)
            << mask << " " << cut;
        EXPECT_LT(largest_difference(whole.lse_rows(b), left->lse_rows(b)), kTolerance) << mask << " " << cut;
      }
    }
  }
}

TEST(Merging, SinkEntersOnceInCombine) {
  SequenceRun whole("attention sk=100 sink" + common_line("causal"));
  whole.run();
  const auto left = part_of(whole, common_line("causal"), 0, 30);
  const auto right = part_of(whole, common_line("causal"), 30, 100);
  SequenceRun merged("combine b=2 sq=40 hq=4 d=32 sink lse");
  const Bindings& parts = merged.bindings();
  const SequenceRun* sources[] = {left.get(), right.get()};
  for (std::int64_t p = 0; p < 2; ++p) {
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t i = 0; i < 40; ++i) {
          const std::vector<double> row = sources[p]->query_row(Slot::o, b, i, h);
          for (std::int64_t c = 0; c < 32; ++c) {
            reference::write(parts[Slot::o_parts], (((p * 2 + b) * 40 + i) * 4 + h) * 32 + c,
                             row[static_cast<std::size_t>(c)]);
          }
          reference::write(parts[Slot::lse_parts], ((p * 2 + b) * 4 + h) * 40 + i, sources[p]->lse(Slot::lse, b, i, h));
        }
      }
    }
  }
  for (std::int64_t h = 0; h < 4; ++h) {
    reference::write(parts[Slot::sink], h, reference::read(whole.bindings()[Slot::sink], h));
  }
  merged.remember();
  merged.run();
  for (std::int64_t b = 0; b < 2; ++b) {
    std::vector<double> o;
    std::vector<double> lse;
    for (std::int64_t i = 0; i < 40; ++i) {
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t c = 0; c < 32; ++c) {
          o.push_back(reference::read(parts[Slot::o], ((b * 40 + i) * 4 + h) * 32 + c));
        }
        lse.push_back(reference::read(parts[Slot::lse], (b * 4 + h) * 40 + i));
      }
    }
    EXPECT_LT(largest_difference(whole.query_rows(Slot::o, b), o), kTolerance);
    EXPECT_LT(largest_difference(whole.lse_rows(b), lse), kTolerance);
  }
}

TEST(Merging, SplitsElsewhereAgree) {
  const std::string common = "attention b=2 sq=3 sk=500 hq=4 hkv=2 d=32 causal lse tile_kv=32 seed=2 splits=";
  SequenceRun one(common + "1");
  one.run();
  for (const char* splits : {"2", "3", "7"}) {
    SequenceRun other(common + splits);
    other.run();
    for (std::int64_t b = 0; b < 2; ++b) {
      EXPECT_LT(largest_difference(one.query_rows(Slot::o, b), other.query_rows(Slot::o, b)), kTolerance) << splits;
      EXPECT_LT(largest_difference(one.lse_rows(b), other.lse_rows(b)), kTolerance) << splits;
    }
  }
}

TEST(Merging, TwoSegmentsAreOneSequence) {
  SequenceRun whole("attention b=2 sq=30 sk=80 hq=4 hkv=2 d=32 causal lse seed=3");
  whole.run();
  SequenceRun segments("attention b=2 sq=30 sk=50 kv2=dense sk2=30 hq=4 hkv=2 d=32 causal lse seed=4");
  segments.copy_inputs(whole);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t j = 0; j < 30; ++j) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (const auto& [from, to] : {std::pair{Slot::k, Slot::k2}, std::pair{Slot::v, Slot::v2}}) {
          const std::vector<double> row = whole.key_row(from, b, 50 + j, h);
          const Tensor& tensor = segments.bindings()[to];
          for (std::int64_t c = 0; c < 32; ++c) {
            reference::write(tensor, reference::token_offset(tensor, b * 30 + j, h) + c,
                             row[static_cast<std::size_t>(c)]);
          }
        }
      }
    }
  }
  segments.remember();
  segments.run();
  for (std::int64_t b = 0; b < 2; ++b) {
    EXPECT_LT(largest_difference(whole.query_rows(Slot::o, b), segments.query_rows(Slot::o, b)), kTolerance);
    EXPECT_LT(largest_difference(whole.lse_rows(b), segments.lse_rows(b)), kTolerance);
  }
}

}  // namespace
}  // namespace tessera::test
