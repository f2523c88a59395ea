// SPDX-License-Identifier: Apache-2.0
#include "cpu/forward/mass.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace tessera::cpu {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kSkipCap = 4.0F;  // the largest mass that a state can remember

/// Folds rows [from, to) of a panel, column by column.
template <class Fold>
std::array<float, kPanel> fold_rows(std::int64_t from, std::int64_t to, std::int64_t columns, const float* rows,
                                    float start, Fold fold) {
  std::array<float, kPanel> result;
  result.fill(start);
  for (std::int64_t row = from; row < to; ++row) {
    const float* values = rows + row * kPanel;
    for (std::int64_t first = 0; first < columns; first += kPad) {
      float* to_fold = result.data() + first;
      for (std::int64_t c = 0; c < kPad; ++c) to_fold[c] = fold(to_fold[c], values[first + c]);
    }
  }
  return result;
}

}  // namespace

MassGatherer MassGatherer::place(Arena& arena, const Problem& problem, std::int64_t columns) {
  MassGatherer gatherer;
  gatherer.blocks_ = problem.key_blocks();
  gatherer.columns_ = columns;
  gatherer.square_ = problem.mass != MassKind::mean;
  gatherer.by_maxima_ = problem.skip.kind == SkipRule::Kind::threshold;
  gatherer.cap_ = problem.skip ? kSkipCap : -kNothing;
  gatherer.sum_ = arena.take<float>(gatherer.blocks_, columns);
  gatherer.maximum_ = arena.take<float>(gatherer.blocks_, columns);
  gatherer.touched_ = arena.take<bool>(gatherer.blocks_);
  gatherer.mass_ = arena.take<float>(gatherer.blocks_);
  return gatherer;
}

void MassGatherer::begin_block() {
  rows_ = 0;
  unknown_ = false;
  std::fill_n(mass_, blocks_, by_maxima_ ? kNothing : 0.0F);
}

void MassGatherer::begin_tile() { std::fill_n(touched_, blocks_, false); }

template <class Use>
void MassGatherer::for_each_span(const KeyTile& tile, std::int64_t first, std::int64_t end, Use use) {
  for (std::int64_t s = 0; s < tile.span_count; ++s) {
    const Span& span = tile.spans[s];
    const std::int64_t from = std::max(span.row, first);
    const std::int64_t to = std::min(span.row + span.count, end);
    if (from >= to) continue;
    if (!touched_[span.block]) {
      touched_[span.block] = true;
      std::fill_n(sum_ + span.block * columns_, columns_, 0.0F);
      std::fill_n(maximum_ + span.block * columns_, columns_, kNothing);
    }
    use(span.block * columns_, from, to);
  }
}

void MassGatherer::add(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column,
                       std::int64_t columns, const float* p, const float* maximum) {
  for_each_span(tile, first, end, [&](std::int64_t block_row, std::int64_t from, std::int64_t to) {
    float* sums = sum_ + block_row + first_column;
    float* maxima = maximum_ + block_row + first_column;
    const auto in_span = fold_rows(from, to, columns, p, 0.0F, [](float a, float b) { return a + b; });
    for (std::int64_t c = 0; c < columns; ++c) {
      const float sum = in_span[static_cast<std::size_t>(c)];
      if (sum == 0.0F) continue;
      sums[c] = sums[c] * std::exp(maxima[c] - maximum[c]) + sum;
      maxima[c] = maximum[c];
    }
  });
}

void MassGatherer::add_scores(const KeyTile& tile, std::int64_t first, std::int64_t end, std::int64_t first_column,
                              std::int64_t columns, const float* scores) {
  for_each_span(tile, first, end, [&](std::int64_t block_row, std::int64_t from, std::int64_t to) {
    float* maxima = maximum_ + block_row + first_column;
    const auto in_span =
        fold_rows(from, to, columns, scores, kNothing, [](float a, float b) { return std::max(a, b); });
    for (std::int64_t c = 0; c < columns; ++c) maxima[c] = std::max(maxima[c], in_span[static_cast<std::size_t>(c)]);
  });
}

void MassGatherer::end_tile(std::int64_t columns, const float* lse) {
  rows_ += columns;
  for (std::int64_t block = 0; block < blocks_; ++block) {
    if (!touched_[block]) continue;
    const float* sums = sum_ + block * columns_;
    const float* maxima = maximum_ + block * columns_;
    for (std::int64_t c = 0; c < columns; ++c) {
      if (sums[c] == 0.0F || lse[c] == kNothing) continue;
      const float mass = std::min(sums[c] * std::exp(maxima[c] - lse[c]), cap_);
      mass_[block] += square_ ? mass * mass : mass;
    }
  }
}

void MassGatherer::finish_rows() {
  for (std::int64_t block = 0; block < blocks_; ++block) {
    const float mean = rows_ > 0 ? mass_[block] / static_cast<float>(rows_) : 0.0F;
    mass_[block] = square_ ? std::sqrt(mean) : mean;
  }
}

void MassGatherer::end_block(const Problem& problem, const Bindings& bindings, std::int64_t batch, std::int64_t head,
                             std::int64_t query_block) {
  const auto row_of = [&](const Tensor& tensor) {
    return batch * tensor.strides[0] + head * tensor.strides[1] + query_block * tensor.strides[2];
  };
  finish_rows();
  if (const Tensor& mass = bindings[Slot::tile_mass]) std::copy_n(mass_, blocks_, mass.as<float>() + row_of(mass));
  const auto kept = [&](std::int64_t block) { return mass_[block] > problem.next_threshold; };
  if (problem.next == TileList::Form::indices) {
    const Tensor& indices = bindings[Slot::next_indices];
    std::int32_t* entry = indices.as<std::int32_t>() + row_of(indices);
    std::int32_t count = 0;
    for (std::int64_t block = 0; block < blocks_; ++block) {
      if (kept(block)) entry[count++] = static_cast<std::int32_t>(block);
    }
    std::fill(entry + count, entry + blocks_, -1);
    const Tensor& counts = bindings[Slot::next_counts];
    counts.as<std::int32_t>()[row_of(counts)] = count;
  } else if (problem.next == TileList::Form::bitmask) {
    const Tensor& bits = bindings[Slot::next_bits];
    std::uint32_t* words = bits.as<std::uint32_t>() + row_of(bits);
    std::fill_n(words, (blocks_ + 31) / 32, 0U);
    for (std::int64_t block = 0; block < blocks_; ++block) {
      if (kept(block)) words[block / 32] |= 1U << (block % 32);
    }
  }
}

}  // namespace tessera::cpu
