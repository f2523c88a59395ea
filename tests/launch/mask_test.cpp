// SPDX-License-Identifier: Apache-2.0
// Masks and ranges of tiles as kernels compute them, element by element: the device's own text, compiled for the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "shared/params.h"

namespace tessera::cuda {
namespace {

using std::max;
using std::min;

__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(u64{a} * b >> 32); }
u64 __umul64hi(u64 a, u64 b) { return static_cast<u64>(static_cast<UnsignedWide>(a) * b >> 64); }
float __fadd_rn(float a, float b) { return a + b; }

}  // namespace
}  // namespace tessera::cuda

#define __device__
#define __forceinline__ inline
#include "cuda/attention/tiles/tile_range.cuh"

namespace tessera::cuda {
namespace {

/// A configuration of no kernel's: what masks and ranges ask for, and nothing else.
struct Masks {
  bool compressed_causal = false;
  bool chunked = false;
  int tile_q = 16;
  int tile_kv = 8;
  int segments = 1;
};

i64 floor_of(i64 a, i64 b) { return a / b - (a % b < 0 ? 1 : 0); }

/// A problem of one sequence and one segment, and who sees whom in it by the words of docs/semantics.md.
struct Random {
  AttentionParams p{};
  Sequence sequence{};
  std::mt19937_64 bits;

  explicit Random(u64 seed, const Masks& masks) : bits(seed) {
    const auto far = [&] { return number(0, 3) == 0 ? number(-(i64{1} << 56), i64{1} << 56) : number(-100, 100); };
    const auto side = [&] { return number(0, 3) == 0 ? kUnbounded : number(-40, 40); };
    sequence.q = {0, static_cast<int>(number(0, 70)), 100};
    sequence.first.extent = {0, static_cast<int>(number(0, 70)), 100};
    sequence.q_position = far();
    sequence.first.position = number(0, 4) == 0 ? far() : sequence.q_position + number(-60, 60);
    p.window_left = side();
    p.window_right = side();
    p.group = Divisor(static_cast<int>(number(1, 5)));
    p.splits = Divisor(static_cast<int>(number(1, 4)));
    if (masks.compressed_causal) {
      p.compressed_stride = number(1, 9);
      p.compressed_length = number(0, 20);
      if (number(0, 3) != 0)
        sequence.first.position = floor_of(sequence.q_position, p.compressed_stride) + number(-9, 9);
    }
    if (masks.chunked) {
      const i64 size = number(1, 50);
      p.chunk.size = WideDivisor(static_cast<u64>(size));
      p.chunk.above = round_up(i64{1} << 61, size);
    }
  }

  i64 number(i64 least, i64 most) { return std::uniform_int_distribution<i64>(least, most)(bits); }
  [[nodiscard]] int queries() const { return sequence.q.length; }
  [[nodiscard]] int keys() const { return sequence.first.extent.length; }

  [[nodiscard]] bool sees(int query, int key) const {
    const i64 q = sequence.q_position + query;
    const i64 k = sequence.first.position + key;
    if (query >= queries() || key >= keys()) return false;
    if (Wide{k} < Wide{q} - p.window_left || Wide{k} > Wide{q} + p.window_right) return false;
    if (p.compressed_stride != 0 && Wide{k} * p.compressed_stride + p.compressed_length > Wide{q} + 1) return false;
    if (p.chunk.above == 0) return true;
    const auto size = static_cast<i64>(p.chunk.size.value);
    return floor_of(q, size) == floor_of(k, size);
  }
};

bool contains(const Interval& interval, int at) { return at >= interval.begin && at < interval.end; }

template <Masks C>
class OfMasks {
 public:
  explicit OfMasks(u64 seed) : r_(seed, C) {}

  void expect_both_directions_agree() {
    const auto first_query = static_cast<int>(r_.number(0, 20));
    const auto first_key = static_cast<int>(r_.number(0, 20));
    const KeysOfQueries<C> keys(r_.p, r_.sequence, r_.sequence.first, first_query);
    const QueriesOfKeys<C> queries(r_.p, r_.sequence, r_.sequence.first, first_key);
    for (int i = first_query; i < r_.queries(); ++i) {
      for (int j = first_key; j < r_.keys() + 5; ++j) {
        ASSERT_EQ(contains(keys.of(i), j), r_.sees(i, j)) << "key " << j << " of query " << i;
        ASSERT_EQ(contains(queries.of(j), i), r_.sees(i, j)) << "query " << i << " of key " << j;
      }
    }
  }

  /// Tiles of keys of a tile of queries and tiles of queries of a tile of keys, by the same type.
  void expect_spans_cover() {
    constexpr int rows = 16;
    constexpr int columns = 8;
    for (int i = 0; i < r_.queries(); i += rows) {
      const KeysOfQueries<C> bounds(r_.p, r_.sequence, r_.sequence.first, i);
      const TileSpan<columns> span(bounds, i, std::min(i + rows, r_.queries()) - 1);
      expect_covers(span, r_.keys(), [&](int j) { return cell(i, std::min(i + rows, r_.queries()), j, j + columns); });
    }
    for (int j = 0; j < r_.keys(); j += columns) {
      const QueriesOfKeys<C> bounds(r_.p, r_.sequence, r_.sequence.first, j);
      const TileSpan<rows> span(bounds, j, std::min(j + columns, r_.keys()) - 1);
      expect_covers(span, r_.queries(), [&](int i) { return cell(i, i + rows, j, std::min(j + columns, r_.keys())); });
    }
  }

  /// The splits of a block of packed rows walk each tile of keys that a row sees once, from the last on.
  void expect_splits_walk_every_tile_once() {
    const auto group = static_cast<int>(r_.p.group.value);
    for (int row = 0; row < r_.queries() * group; row += C.tile_q) {
      std::vector<int> walked;
      for (auto split = static_cast<int>(r_.p.splits.value) - 1; split >= 0; --split) {
        const TileRange<C> tiles(r_.p, r_.sequence, Block{row, 0, 0, 0, split});
        for (int i = 0; i < tiles.count(); ++i) {
          walked.push_back(tiles.at(i).first);
          const Cell found = cell(row / group, (std::min(row + C.tile_q, r_.queries() * group) - 1) / group + 1,
                                  walked.back(), walked.back() + C.tile_kv);
          ASSERT_TRUE(tiles.at(i).cut_begin || tiles.at(i).cut_end || found.all);
        }
      }
      for (std::size_t i = 1; i < walked.size(); ++i) ASSERT_EQ(walked[i], walked[i - 1] - C.tile_kv);
      for (int key = 0; key < r_.keys(); ++key) {
        const bool seen =
            cell(row / group, (std::min(row + C.tile_q, r_.queries() * group) - 1) / group + 1, key, key + 1).any;
        ASSERT_TRUE(!seen || std::count(walked.begin(), walked.end(), key / C.tile_kv * C.tile_kv) == 1);
      }
    }
  }

 private:
  struct Cell {
    bool any = false, all = true;
  };
  [[nodiscard]] Cell cell(int first_query, int end_query, int first_key, int end_key) const {
    Cell found;
    for (int i = first_query; i < end_query; ++i) {
      for (int j = first_key; j < end_key; ++j) {
        found.any |= r_.sees(i, j);
        found.all &= r_.sees(i, j);
      }
    }
    return found;
  }

  template <int size, class CellOf>
  static void expect_covers(const TileSpan<size>& span, int length, CellOf cell_of) {
    for (int first = 0; first < length; first += size) {
      const int index = first / size - span.begin;
      const Cell found = cell_of(first);
      const bool walked = index >= 0 && index < span.count;
      ASSERT_TRUE(walked || !found.any) << "tile at " << first;
      if (!walked) continue;
      ASSERT_EQ(span.first(index), first);
      const bool cut = first < span.full.begin || first + size > span.full.end;
      ASSERT_TRUE(cut || found.all) << "tile at " << first;
    }
  }

  Random r_;
};

template <Masks C>
void expect_for_random_problems() {
  for (u64 seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    OfMasks<C> problem(seed);
    problem.expect_both_directions_agree();
    problem.expect_spans_cover();
    problem.expect_splits_walk_every_tile_once();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Mask, QueriesAndKeysAgreeUnderWindows) { expect_for_random_problems<Masks{}>(); }
TEST(Mask, QueriesAndKeysAgreeUnderCompressedCausalMasks) {
  expect_for_random_problems<Masks{.compressed_causal = true}>();
}
TEST(Mask, QueriesAndKeysAgreeUnderChunks) { expect_for_random_problems<Masks{.chunked = true}>(); }
TEST(Mask, QueriesAndKeysAgreeUnderBoth) {
  expect_for_random_problems<Masks{.compressed_causal = true, .chunked = true}>();
}

}  // namespace
}  // namespace tessera::cuda
