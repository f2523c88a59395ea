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

/// Everything of a problem and its bindings that scores need, resolved once per run.
class ScoreStage {
 public:
  ScoreStage(const Problem& problem, const Bindings& bindings, const Kernels& kernels);

  /// Whether apply() changes anything beyond the softcap.
  [[nodiscard]] bool per_element() const { return score_.value != nullptr || slopes_ != nullptr; }
  /// Score callable, then ALiBi. `derivative`, if not nullptr, is multiplied by d score' / d score.
  void apply(const ScoreTile& tile, float* derivative) const;

  [[nodiscard]] bool has_mask() const { return mask_.visible != nullptr; }
  /// Whether classifying small parts of a tile pays off. It does if the mask is a program of the registry: no call is
  /// needed.
  [[nodiscard]] bool classifies_parts() const { return mask_lanes_.extras != nullptr; }
  /// Keys of such a part.
  static constexpr std::int64_t kPartKeys = 64;
  /// The class of a tile of positions according to the mask callable; partial if it has no classifier.
  [[nodiscard]] TileClass classify(std::int64_t batch, std::int64_t head, std::int64_t query_begin,
                                   std::int64_t query_end, std::int64_t key_begin, std::int64_t key_end) const;
  /// Sets s = −inf where the mask callable hides a key.
  void mask(const ScoreTile& tile) const;

  [[nodiscard]] bool has_dropout() const { return threshold_ < 65536; }
  /// Sets factor = 65536 / threshold for kept elements, 0 for dropped ones (docs/semantics.md: Philox per 16 × 16
  /// fragment).
  void dropout_factors(const ScoreTile& tile, float* factor) const;

 private:
  /// The lane programs of a callable that is a program of the registry, for tiles of either layout.
  struct Lanes {
    const Extras* extras = nullptr;
    LaneProgram by_query;  // lanes are queries
    LaneProgram by_key;

    void make(const detail::Expression& expression, const Extras& read);
    /// The program for tiles with the layout of this one; nullptr if the callable must be called for each element.
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
