// SPDX-License-Identifier: Apache-2.0
// Scores linear in the distance of their key and query, s + slope · (key − query), in two parts: what a tile's columns
// differ by is added to the products, one operation each; what its first column has is added to the origins of rows.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/row_shift.cuh"
#include "cuda/attention/scores/text_functions.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// What linear scores ask of a configuration.
template <class Config>
concept LinearScoreConfig = requires(const Config& c) {
  int{c.tile_kv};
  bool{c.linear_score};
};

/// Of the two rows of a thread, which may belong to two heads. Used only with linear_score.
template <LinearScoreConfig auto C, class Score>
struct LinearScore {
  // Beyond it the text is computed for each element: a product is rounded with what its column adds, which is up to
  // tile_kv times as much.
  static constexpr float kSteepest = 4.0F;

  float steepness[2];  // slope / scale: what a key further adds to a product
  bool is_split;       // of all rows of the warp; else the text is computed for each element

  /// For the rows of a row tile; `row`: the upper one, packed.
  template <class Work>
  __device__ __forceinline__ void begin(const AttentionParams& p, const Work& work, int row) {
    bool is_moderate = work.positions_are_small;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at(row + half * 8, p.group);
      const ScorePoint point = point_of(p, work, at, i64{0});
      const float slope = Score::template slope<i64>(AskedSlope{}, point, p.extras).value;
      is_moderate = is_moderate && fabsf(slope) <= kSteepest;
      steepness[half] = slope / p.scale;
    }
    is_split = __all_sync(0xffffffffU, is_moderate) != 0;
  }

  /// Products of a tile to scores in units of products, and what they lack of a row's scaled scores.
  template <class Work, int key_tiles>
  __device__ __forceinline__ RowShift change(const AttentionParams& p, const Work& work, Accumulator<1, key_tiles>& s,
                                             const KvTile& tile, int row, int lane) const {
    const int first_key = tile.first + lane % 4 * 2;
    const i64 first_position = work.sequence.segment(tile.segment).position + first_key;
    if (!is_split) return change_each(p, work, s, tile, row, first_position);
    RowShift shift;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at(row + half * 8, p.group);
      const int ahead = static_cast<int>(first_position) - static_cast<int>(work.sequence.q_position) - at.query;
      shift.by[half] = __fmul_rn(steepness[half] * (p.scale * kLog2E), float_of_small(ahead));
    }
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
      const auto moved = static_cast<float>(work.tiles.moved(tile, n * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s.tile[0][n][i];
        score = __fmaf_rn(steepness[i / 2], static_cast<float>(n * 8 + i % 2) + moved, score);
      }
    }
    return shift;
  }

 private:
  template <class Work, int key_tiles>
  __device__ __forceinline__ RowShift change_each(const AttentionParams& p, const Work& work,
                                                  Accumulator<1, key_tiles>& s, const KvTile& tile, int row,
                                                  i64 first_position) const {
    const float inverse = __frcp_rn(p.scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PackedRow at(row + half * 8, p.group);
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        const int moved = work.tiles.moved(tile, n * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s.tile[0][n][half * 2 + i];
          const ScorePoint point = point_of(p, work, at, first_position + (n * 8 + i + moved));
          score = __fmul_rn(Score::template value<i64>(__fmul_rn(score, p.scale), point, p.extras), inverse);
        }
      }
    }
    return {{0.0F, 0.0F}};
  }
};

/// Of configurations without.
struct NoLinearScore {};

template <LinearScoreConfig auto C, class Score, bool is_linear = C.linear_score>
struct LinearScoreOf {
  using type = NoLinearScore;
};
template <LinearScoreConfig auto C, class Score>
struct LinearScoreOf<C, Score, true> {
  using type = LinearScore<C, Score>;
};

}  // namespace tessera::cuda
