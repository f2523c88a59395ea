// SPDX-License-Identifier: Apache-2.0
// A skip state's step: the masses or maxima of a block's tiles become the next step's list and memory
// (docs/skip-state.md).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/forward/unit.h"

namespace tessera::cpu {
namespace {

constexpr int kCodeOfOne = 239;  // eight codes per power of two; 255 is a mass of 4
constexpr int kMostCode = 255;

int code_of(float mass) {
  if (mass <= 0.0F) return 0;
  return std::clamp(static_cast<int>(std::lround(8.0F * std::log2(mass))) + kCodeOfOne, 0, kMostCode);
}

}  // namespace

void MassGatherer::end_tile_by_maxima(std::int64_t columns, const float* lse, bool down) {
  rows_ += columns;
  for (std::int64_t c = 0; c < columns; ++c) {
    if (!std::isfinite(lse[c])) continue;
    float before = kNothing;
    for (std::int64_t i = 0; i < blocks_; ++i) {
      const std::int64_t block = down ? blocks_ - 1 - i : i;
      if (!touched_[block]) continue;
      const float largest = maximum_[block * columns_ + c];
      if (largest == kNothing) continue;
      mass_[block] = std::max(mass_[block], (largest - before) * std::numbers::log2e_v<float>);
      before = std::max(before, largest);
    }
  }
}

void MassGatherer::move_state(const Problem& problem, const Bindings& bindings, const TileListReader& list,
                              std::int64_t batch, std::int64_t head, std::int64_t query_block) {
  if (rows_ == 0) return;
  if (!by_maxima_) finish_rows();
  const auto row_of = [&](const Tensor& tensor) {
    return batch * tensor.strides[0] + head * tensor.strides[1] + query_block * tensor.strides[2];
  };
  const Tensor& thresholds = bindings[Slot::skip_threshold];
  const float threshold = thresholds.as<const float>()[head * thresholds.strides[0]];
  const Tensor& bits = bindings[Slot::tile_bits];
  std::uint32_t* words = bits.as<std::uint32_t>() + row_of(bits);
  const Tensor& memory = bindings[Slot::skip_memory];
  std::uint8_t* codes = by_maxima_ ? nullptr : memory.as<std::uint8_t>() + row_of(memory);
  std::uint32_t next = 0;
  for (std::int64_t block = 0; block < blocks_; ++block) {
    const bool computed = list.at(batch, head, query_block, block) != TileClass::none;
    bool kept = (words[block / 32] >> (block % 32) & 1U) != 0;
    if (!by_maxima_) {
      const int grown = std::min(codes[block] + static_cast<int>(problem.skip.growth), kMostCode);
      const int code = !computed ? grown : unknown_ ? kMostCode : code_of(mass_[block]);
      codes[block] = static_cast<std::uint8_t>(code);
      kept = static_cast<float>(code - kCodeOfOne) / 8.0F > threshold;
    } else if (computed) {
      kept = unknown_ || mass_[block] > threshold;
    }
    if (kept) next |= 1U << (block % 32);
    if (block % 32 != 31 && block + 1 != blocks_) continue;
    words[block / 32] = next;  // `list` reads no block of this word any more
    next = 0;
  }
}

void ForwardUnit::finish_skip(const Strip& strip) {
  const Bindings& bindings = run_.bindings;
  float* lse = b_.lse + strip.first_column;
  const bool by_mass = problem_.skip.kind == SkipRule::Kind::mass;
  const ScalarView last = scalars_of(problem_, bindings[Slot::skip_lse], sequence_);
  for (std::int64_t c = 0; c < strip.columns; ++c) {
    const float own = lse[c];
    float prior = own;
    if (by_mass) {
      float& kept = last.at(strip.first_row + c, head_);
      if (!problem_.skip.own_lse) prior = kept;
      kept = own;
    }
    lse[c] = prior;  // a row without keys has no mass, whatever its prior
    if (own == kNothing || (std::isfinite(own) && std::isfinite(prior))) continue;
    strip.mass->set_unknown();
    lse[c] = -kNothing;
  }
  if (by_mass) {
    strip.mass->end_tile(strip.columns, lse);
  } else {
    const std::int32_t step = *bindings[Slot::skip_step].as<const std::int32_t>();
    strip.mass->end_tile_by_maxima(strip.columns, lse, step % 2 != 0);
  }
}

}  // namespace tessera::cpu
