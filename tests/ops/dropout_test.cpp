// SPDX-License-Identifier: Apache-2.0
// The dropout mask of a run, read out element by element and compared with the formula of docs/semantics.md.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "cpu/reference/reference.h"
#include "ops/sequence_run.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kKeys = 64;

/// The rule as it is written down: key, row, batch and head are positions taken as uint32.
bool kept(std::uint64_t seed, std::uint64_t offset, float p, std::uint32_t key, std::uint32_t row, std::uint32_t batch,
          std::uint32_t heads, std::uint32_t head) {
  const auto high = static_cast<std::uint32_t>(offset >> 32);
  const std::uint64_t philox_key = seed ^ (static_cast<std::uint64_t>(high) << 32);
  const auto words = reference::philox(
      {key / 16 * 4 + key % 8 / 2, row / 16 * 8 + row % 8, batch * heads + head, static_cast<std::uint32_t>(offset)},
      {static_cast<std::uint32_t>(philox_key), static_cast<std::uint32_t>(philox_key >> 32)});
  const std::uint32_t number = (key % 16 / 8) * 4 + (row % 16 / 8) * 2 + key % 2;
  const std::uint32_t draw = number % 2 == 0 ? words[number / 2] & 0xffffU : words[number / 2] >> 16;
  return draw < static_cast<std::uint32_t>(std::lround((1.0 - static_cast<double>(p)) * 65536.0));
}

struct DropoutCase {
  const char* values;
  std::uint64_t seed, offset;
  std::int64_t query_position, key_position, batch, head;
};

class Mask : public ::testing::TestWithParam<DropoutCase> {};
INSTANTIATE_TEST_SUITE_P(
    Positions, Mask,
    ::testing::Values(
        DropoutCase{"drop_seed=7 q_offset=0", 7, 0, 0, 0, 0, 0},
        DropoutCase{"drop_seed=7 q_offset=0 drop_scalars drop_offset=12884901893", 7, 12884901893, 0, 0, 0, 0},
        DropoutCase{"drop_seed=18446744073709551615 drop_offset=18446744073709551615 q_offset=-21 k_offset=5",
                    ~std::uint64_t{0}, ~std::uint64_t{0}, -21, 5, 0, 0},
        DropoutCase{"drop_seed=99 q_offset=8589934597 k_offset=8589934599 batch_offset=3 head_offset=2", 99, 0,
                    8589934597, 8589934599, 3, 2}));

TEST_P(Mask, FollowsTheFormula) {
  const DropoutCase& at = GetParam();
  for (const char* tiles : {"", " tile_q=8 tile_kv=16", " tile_q=24 tile_kv=32 threads=2"}) {
    // Equal scores and values that are unit vectors: o[i][j] is row i's weight of key j.
    SequenceRun run("attention b=2 sq=50 sk=64 hq=2 d=8 dv=64 dropout=0.3 " + std::string(at.values) + tiles);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t j = 0; j < kKeys; ++j) {
        for (std::int64_t h = 0; h < 2; ++h) {
          std::vector<double> unit(kKeys, 0.0);
          unit[static_cast<std::size_t>(j)] = 1;
          run.set_key_row(Slot::k, b, j, h, std::vector<double>(8, 0.0));
          run.set_key_row(Slot::v, b, j, h, unit);
        }
      }
    }
    run.remember();
    run.run();
    const double weight = 65536.0 / std::lround((1.0 - static_cast<double>(0.3F)) * 65536.0) / kKeys;
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < 50; ++i) {
          const std::vector<double> row = run.query_row(Slot::o, b, i, h);
          for (std::int64_t j = 0; j < kKeys; ++j) {
            const bool keep =
                kept(at.seed, at.offset, 0.3F, static_cast<std::uint32_t>(at.key_position + j),
                     static_cast<std::uint32_t>(at.query_position + i), static_cast<std::uint32_t>(at.batch + b), 2,
                     static_cast<std::uint32_t>(at.head + h));
            ASSERT_NEAR(row[static_cast<std::size_t>(j)], keep ? weight : 0.0, 1e-7)
                << "batch " << b << " head " << h << " row " << i << " key " << j << tiles;
          }
        }
      }
    }
  }
}

TEST(Dropout, LeavesTheLseAlone) {
  SequenceRun with("attention sq=30 sk=40 hq=2 d=16 lse dropout=0.5 drop_seed=3");
  SequenceRun without("attention sq=30 sk=40 hq=2 d=16 lse");
  without.copy_inputs(with);
  with.run();
  without.run();
  EXPECT_TRUE(same_bits(with.lse_rows(0), without.lse_rows(0)));
  EXPECT_FALSE(same_bits(with.query_rows(Slot::o, 0), without.query_rows(Slot::o, 0)));
}

}  // namespace
}  // namespace tessera::test
