// SPDX-License-Identifier: Apache-2.0
// The oracle's skip state (docs/skip-state.md): the masses or maxima of a step's tiles, and the next step's list.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/reference/attention.h"

namespace tessera::reference {
namespace {

constexpr double kCap = 4;            // largest mass of a row in a tile, because the prior LSE may be far too small
constexpr double kFarthest = 128;     // largest difference of a score and a maximum, in log2
constexpr std::uint32_t kMost = 255;  // code of the cap

/// The nearest code of a mass; there are eight codes per power of two.
double code_of(double mass) {
  if (mass <= 0) return 0;
  return std::clamp(std::round(8 * std::log2(mass)) + 239, 0.0, 255.0);
}

}  // namespace

/// Adds a row's masses, or rises of its maximum, to the tiles of its row tile.
template <class Real>
void Attention<Real>::skip_row(const Row& row, Real lse) {
  const std::int64_t row_tile =
      (row.batch * problem_.heads_q + row.head) * problem_.query_blocks() + row.index / problem_.block_q;
  Real prior = lse;
  if (problem_.skip.kind == SkipRule::Kind::mass) {
    const Rows& rows = sequences_.query[static_cast<std::size_t>(row.batch)];
    const Tensor& last = in_[Slot::skip_lse];
    if (!problem_.skip.own_lse) {
      prior = static_cast<Real>(read(last, lse_offset(last, row.batch, row.head, rows, row.index)));
    }
    put(Slot::skip_lse, lse_index(problem_, row.batch, row.head, rows, row.index), lse);
  }
  if (lse == -kInfinity) return;
  if (!std::isfinite(lse) || !std::isfinite(prior)) {
    unknown_[static_cast<std::size_t>(row_tile)] = 1;
    return;
  }
  const std::size_t first = static_cast<std::size_t>(row_tile * problem_.key_blocks());
  if (problem_.skip.kind == SkipRule::Kind::mass) {
    row_mass_.assign(static_cast<std::size_t>(problem_.key_blocks()), Real{0});
    for (const std::int64_t j : visible_) {
      const auto at = static_cast<std::size_t>(j);
      row_mass_[static_cast<std::size_t>(keys_[at].block)] += exponential(scores_[at], prior);
    }
    for (std::size_t block = 0; block < row_mass_.size(); ++block) {
      const Real mass = std::min(row_mass_[block], static_cast<Real>(kCap));
      mass_[first + block] += mass * mass;
    }
    return;
  }
  row_mass_.assign(static_cast<std::size_t>(problem_.key_blocks()), -kInfinity);  // largest score of each tile
  for (const std::int64_t j : visible_) {
    const auto at = static_cast<std::size_t>(j);
    Real& largest = row_mass_[static_cast<std::size_t>(keys_[at].block)];
    largest = std::max(largest, scores_[at]);
  }
  const bool down = std::fmod(read(in_[Slot::skip_step], 0), 2) != 0;
  Real before = -kInfinity;
  for (std::size_t i = 0; i < row_mass_.size(); ++i) {
    const std::size_t block = down ? row_mass_.size() - 1 - i : i;
    if (row_mass_[block] == -kInfinity) continue;
    const Real octaves = (row_mass_[block] - before) / std::log(Real{2});
    mass_[first + block] = std::max(mass_[first + block],
                                    std::clamp(octaves, static_cast<Real>(-kFarthest), static_cast<Real>(kFarthest)));
    before = std::max(before, row_mass_[block]);
  }
}

/// Writes the next step's list and memory for all row tiles of a head.
template <class Real>
void Attention<Real>::finish_skip(std::int64_t batch, std::int64_t head) {
  const std::int64_t key_blocks = problem_.key_blocks();
  const std::int64_t words = (key_blocks + 31) / 32;
  const bool mass = problem_.skip.kind == SkipRule::Kind::mass;
  const double threshold = read(in_[Slot::skip_threshold], head * in_[Slot::skip_threshold].strides[0]);
  const Tensor& bits = in_[Slot::tile_bits];
  const Tensor& memory = in_[Slot::skip_memory];
  const std::int64_t length = sequences_.query[static_cast<std::size_t>(batch)].length;
  for (std::int64_t block = 0; block < problem_.query_blocks(); ++block) {
    const std::int64_t rows = std::min(length - block * problem_.block_q, problem_.block_q);
    if (rows <= 0) continue;  // no rows, no step
    const std::int64_t row_tile = (batch * problem_.heads_q + head) * problem_.query_blocks() + block;
    const bool unknown = unknown_[static_cast<std::size_t>(row_tile)] != 0;
    const auto at = [&](const Tensor& tensor, std::int64_t column) {
      return batch * tensor.strides[0] + head * tensor.strides[1] + block * tensor.strides[2] + column;
    };
    std::vector<std::uint32_t> next(static_cast<std::size_t>(words), 0);
    for (std::int64_t kb = 0; kb < key_blocks; ++kb) {
      const bool computed = tiles_.at(batch, head, block, kb) != TileState::skipped;
      const bool listed = ((static_cast<std::uint32_t>(read(bits, at(bits, kb / 32))) >> (kb % 32)) & 1U) != 0;
      Real& decides = mass_[static_cast<std::size_t>(row_tile * key_blocks + kb)];
      bool kept = listed;
      if (mass) {
        decides = std::sqrt(decides / static_cast<Real>(rows));
        double code = unknown ? kMost : code_of(decides);
        if (!computed)
          code = std::min<double>(kMost, read(memory, at(memory, kb)) + static_cast<double>(problem_.skip.growth));
        put(Slot::skip_memory, row_tile * key_blocks + kb, code);
        kept = (code - 239) / 8 > threshold;
      } else if (computed) {
        kept = unknown || decides > threshold;
      }
      if (!computed) decides = std::numeric_limits<Real>::quiet_NaN();
      if (unknown && computed) decides = mass ? kCap : kFarthest;
      if (kept) next[static_cast<std::size_t>(kb / 32)] |= 1U << (kb % 32);
    }
    for (std::int64_t w = 0; w < words; ++w)
      put(Slot::tile_bits, row_tile * words + w, next[static_cast<std::size_t>(w)]);
  }
  result_.next_mass.assign(mass_.begin(), mass_.end());
}

template void Attention<double>::skip_row(const Row& row, double lse);
template void Attention<float>::skip_row(const Row& row, float lse);
template void Attention<double>::finish_skip(std::int64_t batch, std::int64_t head);
template void Attention<float>::finish_skip(std::int64_t batch, std::int64_t head);

}  // namespace tessera::reference
