// SPDX-License-Identifier: Apache-2.0
// What happens to a tile of scores between the product with K and the softmax: softcap, score callable, ALiBi, mask
// callable; and dropout after it. Element (query i, key j) is at s[i·query_stride + j·key_stride], so that one code
// serves the forward (rows are keys) and the backward (rows are queries); one of the strides is 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/scores/lane_program.h"
#include "cpu/simd/kernels.h"
#include "tessera/executor.h"

namespace tessera::cpu {

struct ScoreTile {
  float* s = nullptr;
  std::ptrdiff_t query_stride = 0;
  std::ptrdiff_t key_stride = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  const std::int64_t* query_position = nullptr;  // (queries)
  const std::int64_t* key_position = nullptr;    // (keys)
  const std::int32_t* head = nullptr;            // (queries): query head of each
  std::int64_t batch = 0;

  [[nodiscard]] std::ptrdiff_t at(std::int64_t query, std::int64_t key) const {
    return query * query_stride + key * key_stride;
  }
};

/// Everything of a problem and its bindings that scores need, resolved once a run.
class ScoreStage {
 public:
  ScoreStage(const Problem& problem, const Bindings& bindings, const Kernels& kernels);

  /// Whether apply() changes anything beyond the softcap.
  [[nodiscard]] bool per_element() const { return score_.value != nullptr || slopes_ != nullptr; }
  /// Score callable, then ALiBi. `derivative`, if not nullptr, is multiplied by d score' / d score.
  void apply(const ScoreTile& tile, float* derivative) const;

  [[nodiscard]] bool has_mask() const { return mask_.visible != nullptr; }
  /// Whether the classifier is worth asking about small parts of a tile: it is a program's, which costs no call.
  [[nodiscard]] bool classifies_parts() const { return mask_lanes_.extras != nullptr; }
  /// Keys of such a part.
  static constexpr std::int64_t kPartKeys = 64;
  /// What the mask's classifier says of a tile of positions; partial without one.
  [[nodiscard]] TileClass classify(std::int64_t batch, std::int64_t head, std::int64_t query_begin,
                                   std::int64_t query_end, std::int64_t key_begin, std::int64_t key_end) const;
  /// s = −inf where the mask callable hides.
  void mask(const ScoreTile& tile) const;

  [[nodiscard]] bool has_dropout() const { return threshold_ < 65536; }
  /// factor = 65536 / threshold where kept, 0 where dropped (DESIGN: Philox per 16 × 16 fragment).
  void dropout_factors(const ScoreTile& tile, float* factor) const;

 private:
  /// A callable that is a program of the registry, for tiles of either layout.
  struct Lanes {
    const Extras* extras = nullptr;
    LaneProgram by_query;  // lanes are queries
    LaneProgram by_key;

    void make(const detail::Expression& expression, const Extras& read);
    /// Of tiles whose elements lie as the scores do; nullptr where elements have to be asked for one by one.
    [[nodiscard]] const LaneProgram* of(const ScoreTile& tile) const;
  };
  [[nodiscard]] LaneTile lane_tile(const ScoreTile& tile, const Extras* extras) const;

  const Kernels& kernels_;
  ScoreFunction score_;
  MaskFunction mask_;
  Lanes score_lanes_, mask_lanes_;
  const float* slopes_ = nullptr;
  std::ptrdiff_t slope_batch_ = 0, slope_head_ = 0;
  std::int64_t batch_offset_ = 0, head_offset_ = 0, heads_ = 1;
  std::uint32_t threshold_ = 65536;
  std::uint64_t seed_ = 0, offset_ = 0;
};

}  // namespace tessera::cpu
