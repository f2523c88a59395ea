// SPDX-License-Identifier: Apache-2.0
// Turns the products Q·Kᵀ of a tile into scores: with scale_first scales and changes them, and sets hidden ones to −∞.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/attention/tiles/mask.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// What finished scores require of a configuration.
template <class Config>
concept FinishConfig =
    MaskConfig<Config> && ScoreConfig<Config> && ElementMaskConfig<Config> && requires(const Config& c) {
      int{c.rows_a_warp()};
      bool{c.scale_first};
    };

/// Finishes the scores of a warp's rows and one tile of keys.
template <FinishConfig auto C, class User, TileWork Work>
struct FinishScores {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using Scores = Accumulator<row_tiles, C.tile_kv / 8>;

  const AttentionParams& p;
  const Work& work;
  int warp_row;  // first row of the warp within the block
  int lane;

  /// Most tiles are fully visible. Most others are cut by the end of the sequence or the causal mask only, so that one
  /// comparison is enough. `differentiates`: `derivatives` with respect to the scaled products are computed too; those
  /// of hidden keys are undefined. That is only for configurations with user_score.
  template <bool differentiates = false>
  __device__ __forceinline__ void finish(Scores& s, const KvTile& tile, Scores* derivatives = nullptr) const {
    finish_with<differentiates>(s, tile, derivatives, [&](int m) { return find_hidden(m, tile); });
  }

  /// Finds what a list or the user's mask hides of the 16 rows from 16 · m on; it does not depend on scores. Only for
  /// configurations with tests_elements(), and tiles that are not waived.
  __device__ __forceinline__ HiddenBits<C> find_hidden(int m, const KvTile& tile) const {
    const ElementMask<C, typename User::Mask, Work> mask{p, work};
    HiddenBits<C> hidden;
    if (are_small<typename User::Mask>(tile)) {
      mask.template find<int>(hidden, packed_row(m, 0), tile, lane);
    } else {
      mask.template find<i64>(hidden, packed_row(m, 0), tile, lane);
    }
    return hidden;
  }
  /// finish() of 16 rows, with the result of an earlier find_hidden().
  __device__ __forceinline__ void finish(Scores& s, const KvTile& tile, const HiddenBits<C>& hidden) const {
    static_assert(row_tiles == 1);
    finish_with<false>(s, tile, nullptr, [&](int /*m*/) { return hidden; });
  }

 private:
  template <bool differentiates, class Hidden>
  __device__ __forceinline__ void finish_with(Scores& s, const KvTile& tile, Scores* derivatives, Hidden hidden) const {
    if constexpr (C.scale_first) {
      if (are_small<typename User::Score>(tile)) {
        change<int, differentiates>(s, tile, derivatives);
      } else {
        change<i64, differentiates>(s, tile, derivatives);
      }
    }
    if constexpr (C.tests_elements()) {
      if (!tile.waived) {
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) hide(s, m, hidden(m));
      }
    }
    if constexpr (C.scale_first || C.tests_elements()) {
      if (tile.cut_begin || tile.cut_end) cut<true, true>(s, tile);
    } else {
      if (tile.cut_begin) cut<true, false>(s, tile);
      if (tile.cut_end) cut<false, true>(s, tile);
    }
  }

  /// Whether the callable computes with positions of 32 bits.
  template <class Callable>
  __device__ __forceinline__ bool are_small(const KvTile& tile) const {
    if constexpr (!Callable::uses_position) return false;
    if constexpr (requires { bool{work.positions_are_small}; }) return work.positions_are_small;
    const Sequence& sequence = work.sequence;
    return are_positions_small(p, sequence.q_position, sequence.q.length, sequence.segment(tile.segment));
  }
  __device__ __forceinline__ int packed_row(int m, int half) const {
    return work.block.first_row + warp_row + m * 16 + half * 8 + lane / 4;
  }

  /// Applies scale, softcap, score callable and ALiBi. `Position`: the integer type in which the callable may compute.
  template <class Position, bool differentiates>
  __device__ __forceinline__ void change(Scores& s, const KvTile& tile, Scores* derivatives) const {
    const int first_query = PackedRow(work.block.first_row, p.group).query;
    const int first_key = tile.first + lane % 4 * 2;
    const i64 first_position = work.sequence.segment(tile.segment).position + first_key;
    // These barriers keep loads of user code from moving up, where each would take registers. The 64-bit version of
    // code that also has a 32-bit one is rarely used, and has more of them.
    constexpr int barrier = User::Score::uses_position && sizeof(Position) == 8 ? 2 : 4;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PackedRow at(packed_row(m, half), p.group);
        float slope = 0.0F;
        if constexpr (C.alibi) {
          slope = p.slopes[work.block.batch * p.slopes_batch + (work.block.head + at.head) * p.slopes_head];
        }
#pragma unroll
        for (int n = 0; n < C.tile_kv / 8; ++n) {
          if (differentiates && n % barrier == 0) __syncwarp();
          const int moved = work.tiles.moved(tile, n * 8);
          const Distances distances(work.sequence, work.sequence.segment(tile.segment), first_query, first_key + moved);
          // Computed once for all n unless a list's tile gathers granules.
          const float near = distances.near_of(at.query);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = s.tile[m][n][half * 2 + i];
            const auto point = [&] { return point_of(p, work, at, first_position + (n * 8 + i + moved)); };
            if constexpr (differentiates) {
              derivatives->tile[m][n][half * 2 + i] =
                  score_derivative_of<C, typename User::Score, Position>(score, p, point);
            }
            score = score_of<C, typename User::Score, Position>(score, p, slope, distances.of(near, n * 8 + i), point);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void hide(Scores& s, int m, const HiddenBits<C>& hidden) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < C.tile_kv / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (hidden.at(half, n, i)) s.tile[m][n][half * 2 + i] = -kInfinity;
        }
      }
    }
  }

  /// Hides the keys in front of each row's interval, those behind it, or both.
  template <bool begins, bool ends>
  __device__ __forceinline__ void cut(Scores& s, const KvTile& tile) const {
    const int first_query = PackedRow(work.block.first_row, p.group).query;
    const KeysOfQueries<C> bounds(p, work.sequence, work.sequence.segment(tile.segment), first_query);
    const int first_key = tile.first + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PackedRow at(packed_row(m, half), p.group);
        const Interval visible = bounds.of(at.query);
        const int begin = visible.begin - first_key;
        const int end = visible.end - first_key;
#pragma unroll
        for (int n = 0; n < C.tile_kv / 8; ++n) {
          const int moved = work.tiles.moved(tile, n * 8);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = n * 8 + i + moved;
            if ((ends && key >= end) || (begins && key < begin)) s.tile[m][n][half * 2 + i] = -kInfinity;
          }
        }
      }
    }
  }
};

}  // namespace tessera::cuda
