// SPDX-License-Identifier: Apache-2.0
// Which of the fibres that can go on does so next, or which of the boxes that TMA was asked for comes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

#include "kernel/calls.h"

namespace emulator {

/// Order 0: the one that has waited longest; a box when none can, the one asked for last. Others draw, of two ways by
/// turns: a lane of any warp, or one of the first warp of a drawn sequence that has any. There some warp comes last
/// whenever others can go on, which is what it takes to see that nobody waits for it (Burckhardt et al. 2010,
/// probabilistic concurrency testing). TMA counts as a warp that brings a box when it is drawn, by turns as the last.
class Ready {
 public:
  void begin(int warps, std::uint64_t order) {
    order_ = order;
    fibres_.clear();
    of_warp_.assign(static_cast<std::size_t>(warps), {});
    left_of_turn_ = 0;
    const std::uint64_t block = block_index.x + 0x10001ULL * block_index.y + 0x1000003ULL * block_index.z;
    drawn_ = (2 * order + block + 1) * 0x9e3779b97f4a7c15ULL | 1;
    sequence_.resize(of_warp_.size() + 1);
    std::iota(sequence_.begin(), sequence_.end(), std::size_t{0});
  }
  [[nodiscard]] bool empty() const {
    return fibres_.empty() &&
           std::all_of(of_warp_.begin(), of_warp_.end(), [](const auto& all) { return all.empty(); });
  }
  void add(int thread) {
    if (order_ == 0) {
      fibres_.push_back(thread);
    } else {
      of_warp_[static_cast<std::size_t>(thread / 32)].push_back(thread);
    }
  }
  /// A fibre, or kBox if it is the turn of one of `boxes` that are under way. There is one or the other.
  static constexpr int kBox = -1;
  int take(std::size_t boxes) {
    if (order_ == 0) {
      if (fibres_.empty()) return kBox;
      const int next = fibres_.front();
      fibres_.pop_front();
      return next;
    }
    if (left_of_turn_-- == 0) {
      left_of_turn_ = kShortestTurn << draw(6);
      for (std::size_t i = sequence_.size(); i > 1; --i) std::swap(sequence_[i - 1], sequence_[draw(i)]);
      any_warp_ = draw(2) == 0;
      boxes_come_last_ = draw(2) == 0;
    }
    if (empty()) return kBox;
    const bool box_may_come = boxes > 0 && !boxes_come_last_;
    const std::size_t tma = of_warp_.size();
    std::size_t at = any_warp_ ? draw(sequence_.size()) : 0;
    while (sequence_[at] == tma ? !box_may_come : of_warp_[sequence_[at]].empty()) at = (at + 1) % sequence_.size();
    if (sequence_[at] == tma) return kBox;
    std::vector<int>& lanes = of_warp_[sequence_[at]];
    std::swap(lanes.back(), lanes[draw(lanes.size())]);
    const int next = lanes.back();
    lanes.pop_back();
    return next;
  }
  std::size_t draw_box(std::size_t boxes) { return order_ == 0 ? boxes - 1 : draw(boxes); }

 private:
  /// A number below `count` (Marsaglia 2003, xorshift).
  std::size_t draw(std::size_t count) {
    drawn_ ^= drawn_ << 13U;
    drawn_ ^= drawn_ >> 7U;
    drawn_ ^= drawn_ << 17U;
    return (drawn_ >> 20U) % count;
  }

  std::uint64_t order_ = 0, drawn_ = 1;
  // Fibres until another sequence is drawn; a tile takes some thousand.
  static constexpr std::size_t kShortestTurn = 500;
  std::size_t left_of_turn_ = 0;
  bool any_warp_ = false, boxes_come_last_ = false;
  std::deque<int> fibres_;  // in order 0
  std::vector<std::vector<int>> of_warp_;
  std::vector<std::size_t> sequence_;  // of warps, and of TMA, whose number is behind theirs
};

}  // namespace emulator
