// SPDX-License-Identifier: Apache-2.0
// NaN of any payload stays NaN, from whatever fp32 input it comes: slopes, an LSE, a callable's results. What K, V and
// Q hold is in tests/cases/not_finite.txt.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "cases/inputs/poison.h"
#include "cases/trial.h"
#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

class NanPayload : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] std::string common() const { return " sq=40 sk=70 hq=2 d=32 seed=3 isa=" + GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Isas, NanPayload, ::testing::ValuesIn(cases::tested_isas()),
                         [](const auto& isa) { return isa.param; });

void put(const Tensor& tensor, std::int64_t at, std::uint64_t kind) {
  const std::uint32_t bits = cases::nan_bits(DType::fp32, kind);
  std::memcpy(tensor.bytes() + at * 4, &bits, sizeof bits);
}

bool all_nan(const std::vector<double>& row) {
  for (const double value : row) {
    if (!std::isnan(value)) return false;
  }
  return true;
}

bool all_finite(const std::vector<double>& row) {
  for (const double value : row) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

TEST_P(NanPayload, OfASlope) {
  for (const char* type : {"fp32", "bf16"}) {
    for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
      SequenceRun run(std::string("attention alibi lse dtype=") + type + common());
      put(run.bindings()[Slot::alibi_slopes], 1, kind);
      run.run();
      for (std::int64_t row = 0; row < 40; ++row) {
        EXPECT_TRUE(all_finite(run.query_row(Slot::o, 0, row, 0))) << type << kind;
        EXPECT_TRUE(all_nan(run.query_row(Slot::o, 0, row, 1))) << type << kind;
        EXPECT_TRUE(std::isnan(run.lse(Slot::lse, 0, row, 1))) << type << kind;
      }
    }
  }
}

TEST_P(NanPayload, OfACallable) {
  for (const char* type : {"fp32", "bf16"}) {
    for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
      SequenceRun run(std::string("attention score=relative lse dtype=") + type + common());
      float nan = std::bit_cast<float>(cases::nan_bits(DType::fp32, kind));
      run.bindings().score = {[](double score, const ScorePoint& at, void* user) {
                                return at.query - 30 == 7 && at.key == 9 ? *static_cast<const float*>(user) : score;
                              },
                              [](double, const ScorePoint&, void*) { return 1.0; }, &nan};
      run.run();
      for (std::int64_t row = 0; row < 40; ++row) {
        EXPECT_EQ(all_nan(run.query_row(Slot::o, 0, row, 0)), row == 7) << type << kind << " row " << row;
      }
    }
  }
}

TEST_P(NanPayload, OfAnLse) {
  for (const char* type : {"fp32", "bf16"}) {
    for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
      SequenceRun run(std::string("attention pass=backward dtype=") + type + common());
      put(run.bindings()[Slot::lse], 7, kind);
      run.remember();
      run.run();
      for (std::int64_t row = 0; row < 40; ++row) {
        EXPECT_EQ(all_nan(run.query_row(Slot::dq, 0, row, 0)), row == 7) << type << kind << " row " << row;
      }
      EXPECT_TRUE(all_nan(run.key_row(Slot::dk, 0, 5, 0))) << type << kind;
      EXPECT_TRUE(all_nan(run.key_row(Slot::dv, 0, 5, 0))) << type << kind;
    }
  }
}

TEST_P(NanPayload, OfADlse) {
  for (const char* type : {"fp32", "bf16"}) {
    for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
      SequenceRun run(std::string("attention pass=backward dlse dtype=") + type + common());
      put(run.bindings()[Slot::dlse], 7, kind);
      run.remember();
      run.run();
      EXPECT_TRUE(all_nan(run.query_row(Slot::dq, 0, 7, 0))) << type << kind;
      EXPECT_TRUE(all_nan(run.key_row(Slot::dk, 0, 5, 0))) << type << kind;
      EXPECT_TRUE(all_finite(run.key_row(Slot::dv, 0, 5, 0))) << type << kind;
    }
  }
}

TEST_P(NanPayload, OfASink) {
  for (const char* type : {"fp32", "bf16"}) {
    for (std::uint64_t kind = 0; kind < cases::kNanKinds; ++kind) {
      SequenceRun run(std::string("attention pass=backward sink dtype=") + type + common());
      put(run.bindings()[Slot::sink], 1, kind);
      run.remember();
      run.run();
      EXPECT_TRUE(all_finite(run.query_row(Slot::dq, 0, 7, 0))) << type << kind;
      EXPECT_TRUE(all_nan(run.query_row(Slot::dq, 0, 7, 1))) << type << kind;
      EXPECT_TRUE(all_nan(run.key_row(Slot::dk, 0, 5, 1))) << type << kind;
      EXPECT_TRUE(all_nan(run.key_row(Slot::dv, 0, 5, 1))) << type << kind;
    }
  }
}

}  // namespace
}  // namespace tessera::test
