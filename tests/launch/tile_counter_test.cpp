// SPDX-License-Identifier: Apache-2.0
// Row tiles drawn by blocks, which threads stand in for here: the device's own text with the host's atomics.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "shared/params.h"

namespace tessera::cuda {
namespace {

constexpr int kBlocks = 4;
constexpr struct {
  unsigned x = kBlocks;
} gridDim;

u64 atomicAdd(u64* at, u64 value) { return std::atomic_ref(*at).fetch_add(value); }
u64 atomicExch(u64* at, u64 value) { return std::atomic_ref(*at).exchange(value); }
u64 atomicCAS(u64* at, u64 expected, u64 value) {
  std::atomic_ref(*at).compare_exchange_strong(expected, value);
  return expected;
}

}  // namespace
}  // namespace tessera::cuda

#define __device__
#define __forceinline__ inline
#include "cuda/attention/tiles/tile_counter.cuh"

namespace tessera::cuda {
namespace {

class TileCounter : public ::testing::Test {
 protected:
  /// What the blocks of a run draw, in order; `count(block)`: the row tiles that there are, as this block knows it.
  std::vector<int> run(const std::function<int(int)>& count) {
    std::array<std::vector<int>, kBlocks> drawn;
    std::vector<std::thread> blocks;
    blocks.reserve(kBlocks);
    for (int block = 0; block < kBlocks; ++block) {
      blocks.emplace_back([&, block] {
        for (int tile = block; tile < count(block);) {
          tile = kBlocks + next_tile(tile_counter_);
          if (tile < count(block)) drawn.at(static_cast<std::size_t>(block)).push_back(tile);
        }
        finish_counting(tile_counter_);
      });
    }
    for (std::thread& block : blocks) block.join();
    std::vector<int> all;
    for (const auto& some : drawn) all.insert(all.end(), some.begin(), some.end());
    std::sort(all.begin(), all.end());
    return all;
  }
  void expect_right(int count) {
    std::vector<int> all;
    for (int tile = kBlocks; tile < count; ++tile) all.push_back(tile);
    EXPECT_EQ(run([count](int) { return count; }), all);
  }

  std::array<u64, 2> counters_{};
  TileCounterParams tile_counter_{&counters_[0], &counters_[1], 0x123456789A};
};

TEST_F(TileCounter, EveryRowTileIsDrawnOnceWhateverTheWorkspaceHolds) {
  for (const u64 left_behind : {u64{0}, ~u64{0}, u64{5}, tile_counter_.tag, u64{0x123456789B} << 24 | 7}) {
    counters_ = {left_behind, left_behind};
    for (const int count : {100, 4, 1, 5, 0, 1000}) expect_right(count);
  }
}

TEST_F(TileCounter, BlocksThatDisagreeSpoilNoLaterRun) {
  const int counts[][kBlocks] = {{100, 0, 0, 0}, {0, 0, 0, 100}, {7, 50, 3, 20}, {4, 5, 6, 7}, {0, 0, 0, 0}};
  for (const auto& known : counts) {
    run([&](int block) { return known[block]; });
    expect_right(100);
    expect_right(9);
  }
}

}  // namespace
}  // namespace tessera::cuda
