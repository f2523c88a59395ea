// SPDX-License-Identifier: Apache-2.0
#include "cpu/scores/scores.h"

#include <cmath>
#include <limits>

#include "cpu/scores/default_nan.h"
#include "problem/registered_callables.h"

namespace tessera::cpu {

void ScoreStage::Lanes::make(const detail::Expression& expression, const Extras& read) {
  extras = &read;
  make_lane_program(expression, true, by_query);
  make_lane_program(expression, false, by_key);
}

const LaneProgram* ScoreStage::Lanes::of(const ScoreTile& tile) const {
  if (extras == nullptr) return nullptr;
  const LaneProgram* program = tile.query_stride == 1 ? &by_query : (tile.key_stride == 1 ? &by_key : nullptr);
  return program != nullptr && program->usable ? program : nullptr;
}

ScoreStage::ScoreStage(const Problem& problem, const Bindings& bindings, const Kernels& kernels)
    : kernels_(kernels),
      batch_offset_(bindings.batch_offset),
      head_offset_(bindings.head_offset),
      heads_(problem.heads_q) {
  if (!problem.score.empty()) {
    score_ = bindings.score.value != nullptr ? bindings.score : builtin_score(problem.score).value_or(ScoreFunction{});
  }
  if (!problem.mask.empty()) {
    mask_ = bindings.mask.visible != nullptr ? bindings.mask : builtin_mask(problem.mask).value_or(MaskFunction{});
  }
  using detail::HostCallables;
  if (const auto program = HostCallables::program_of(score_); program.expression != nullptr) {
    score_lanes_.make(*program.expression, *program.extras);
  }
  if (const auto program = HostCallables::program_of(mask_); program.expression != nullptr) {
    mask_lanes_.make(*program.expression, *program.extras);
  }
  if (problem.alibi) {
    const Tensor& slopes = bindings[Slot::alibi_slopes];
    slopes_ = slopes.as<float>();
    slope_batch_ = slopes.rank == 2 ? slopes.strides[0] : 0;
    slope_head_ = slopes.strides[static_cast<std::size_t>(slopes.rank - 1)];
  }
  if (problem.dropout > 0.0F) {
    threshold_ = static_cast<std::uint32_t>(std::lround((1.0 - static_cast<double>(problem.dropout)) * 65536.0));
    const Tensor& seed = bindings[Slot::dropout_seed];
    const Tensor& offset = bindings[Slot::dropout_offset];
    seed_ = seed ? *seed.as<std::uint64_t>() : bindings.seed;
    offset_ = offset ? *offset.as<std::uint64_t>() : bindings.offset;
  }
}

LaneTile ScoreStage::lane_tile(const ScoreTile& tile, const Extras* extras) const {
  const bool by_query = tile.query_stride == 1;
  return {tile.s,
          by_query ? tile.key_stride : tile.query_stride,
          by_query ? tile.keys : tile.queries,
          by_query ? tile.queries : tile.keys,
          by_query ? tile.key_position : tile.query_position,
          by_query ? tile.query_position : tile.key_position,
          tile.head,
          by_query,
          tile.batch + batch_offset_,
          head_offset_,
          extras != nullptr && extras->count() > 0 ? &extras->tensor(0) : nullptr};
}

void ScoreStage::apply(const ScoreTile& tile, float* derivative) const {
  if (const LaneProgram* program = score_lanes_.of(tile)) {
    kernels_.run_score(*program, lane_tile(tile, score_lanes_.extras), derivative);
  } else if (score_.value != nullptr) {
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      ScorePoint point{tile.batch + batch_offset_, tile.head[i] + head_offset_, tile.query_position[i], 0};
      for (std::int64_t j = 0; j < tile.keys; ++j) {
        const std::ptrdiff_t at = tile.at(i, j);
        point.key = tile.key_position[j];
        const double before = static_cast<double>(tile.s[at]);
        if (derivative) {
          derivative[at] *= with_default_nan(static_cast<float>(score_.derivative(before, point, score_.user)));
        }
        tile.s[at] = with_default_nan(static_cast<float>(score_.value(before, point, score_.user)));
      }
    }
  }
  if (slopes_) {
    kernels_.subtract_distances(lane_tile(tile, nullptr), slopes_ + tile.batch * slope_batch_, slope_head_);
  }
}

TileClass ScoreStage::classify(std::int64_t batch, std::int64_t head, std::int64_t query_begin, std::int64_t query_end,
                               std::int64_t key_begin, std::int64_t key_end) const {
  if (mask_.classify == nullptr) return TileClass::partial;
  return mask_.classify({batch + batch_offset_, head + head_offset_, query_begin, query_end, key_begin, key_end},
                        mask_.user);
}

void ScoreStage::mask(const ScoreTile& tile) const {
  if (const LaneProgram* program = mask_lanes_.of(tile)) {
    kernels_.run_mask(*program, lane_tile(tile, mask_lanes_.extras));
    return;
  }
  for (std::int64_t i = 0; i < tile.queries; ++i) {
    ScorePoint point{tile.batch + batch_offset_, tile.head[i] + head_offset_, tile.query_position[i], 0};
    for (std::int64_t j = 0; j < tile.keys; ++j) {
      point.key = tile.key_position[j];
      if (!mask_.visible(point, mask_.user)) tile.s[tile.at(i, j)] = -std::numeric_limits<float>::infinity();
    }
  }
}

void ScoreStage::dropout_factors(const ScoreTile& tile, float* factor) const {
  const std::uint64_t key = seed_ ^ (offset_ >> 32 << 32);
  LaneTile factors = lane_tile(tile, nullptr);
  factors.s = factor;
  kernels_.dropout_factors(factors, {{static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)},
                                     static_cast<std::uint32_t>(offset_),
                                     threshold_,
                                     heads_});
}

}  // namespace tessera::cpu
