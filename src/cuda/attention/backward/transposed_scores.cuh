// SPDX-License-Identifier: Apache-2.0
// Scores and dropout where fragments lie keys down: a thread has two keys and, of each tile of 8 columns, two queries.
#pragma once

#include "cuda/attention/backward/query_range.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// The elements of 16 keys by tile_q rows that a list hides, and the user's mask as far as the list does not waive it:
/// bit 4n + 2·half + column of a thread's two keys and its rows of the n-th 8.
template <FwdConfig C, class Mask>
struct ListedElements {
  static_assert(!C.list_elements || C.tile_q <= 128);
  u64 hidden = 0;

  template <class Position>
  __device__ __forceinline__ void find(const FwdParams& p, const KeyWork<C>& work, const QueryTile& tile, int first_key,
                                       int lane) {
    const ListReader reader(p.list, work.batch, work.first_head + tile.head, work.kv_head);
    ListedKeys listed{reader};
    // Rolled, because a test is long.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
#pragma unroll 1
      for (int i = 0; i < C.tile_q / 4; ++i) {
        const int query = tile.first + i / 2 * 8 + lane % 4 * 2 + i % 2;
        const bool hides = key >= work.keys.extent.length || query >= work.q.length ||
                           hides_element<Position>(p, work, tile, query, key, listed);
        hidden |= static_cast<u64>(hides) << (i / 2 * 4 + half * 2 + i % 2);
      }
    }
  }
  __device__ __forceinline__ bool at(int n, int half, int column) const {
    return (hidden >> (n * 4 + half * 2 + column) & 1) != 0;
  }

 private:
  template <class Position>
  static __device__ __forceinline__ bool hides_element(const FwdParams& p, const KeyWork<C>& work,
                                                       const QueryTile& tile, int query, int key, ListedKeys& listed) {
    const ListClass found = listed.find(query, C.segments == 2 ? work.segment : 0, key);
    if (found != ListClass::partial) return found == ListClass::none;
    if constexpr (C.user_mask)
      return !Mask::template visible<Position>(work.point_of(p, tile.head, query, key), p.extras);
    return false;
  }
};

/// What FinishScores is to fragments that lie queries down. With a user's score `derivatives`, by the scaled products,
/// are found too; those of hidden elements hold anything.
template <FwdConfig C, class User>
struct TransposedScores {
  const FwdParams& p;
  const KeyWork<C>& work;
  int warp_row;  // first key of the warp within the block
  int lane;

  using Scores = Accumulator<1, C.tile_q / 8>;

  __device__ __forceinline__ void finish(Scores& s, Scores& derivatives, const QueryTile& tile, bool cut) const {
    if (!C.scale_first && !C.user_mask && !cut) return;
    if constexpr (User::use_position) {
      if (are_positions_small(p, work.q_position, work.q.length, work.keys)) {
        finish_by<int>(s, derivatives, tile, cut);
        return;
      }
    }
    finish_by<i64>(s, derivatives, tile, cut);
  }

  /// `Position`: the integer that callables may compute with.
  template <class Position>
  __device__ __forceinline__ void finish_by(Scores& s, Scores& derivatives, const QueryTile& tile, bool cut) const {
    const int first_key = work.first_key + warp_row + lane / 4;
    ListedElements<C, typename User::Mask> listed;
    if constexpr (C.list_elements) {
      if (cut) listed.template find<Position>(p, work, tile, first_key, lane);
    }
    // Of the first element: to it numbers are added that the compiler knows.
    const ScorePoint corner = work.point_of(p, tile.head, tile.first + lane % 4 * 2, first_key);
    float slope = 0.0F;
    if constexpr (C.alibi) {
      slope = p.slopes[work.batch * p.slopes_batch + (work.first_head + tile.head) * p.slopes_head];
    }
#pragma unroll
    for (int n = 0; n < C.tile_q / 8; ++n) {
      if constexpr (C.user_score) __syncwarp();  // what texts load stays behind it: each takes registers
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int query = tile.first + n * 8 + lane % 4 * 2 + column;
        const Interval visible = work.bounds.of(query);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = s.tile[0][n][half * 2 + column];
          const int key = first_key + half * 8;
          if constexpr (C.scale_first) {
            const auto point = [&] {
              ScorePoint at = corner;
              at.query += n * 8 + column;
              at.key += half * 8;
              return at;
            };
            if constexpr (C.user_score) {
              derivatives.tile[0][n][half * 2 + column] =
                  score_derivative_of<C, typename User::Score, Position>(score, p, point);
            }
            score = score_of<C, typename User::Score, Position>(score, p, slope, distance(query, key), point);
          }
          bool hidden;
          if constexpr (C.user_score || C.warps == 4) {
            hidden = key < visible.begin || key >= visible.end || query >= work.q.length;
          } else {  // no branches: the tests of all elements stand side by side, which takes registers
            hidden = (static_cast<int>(key < visible.begin) | static_cast<int>(key >= visible.end) |
                      static_cast<int>(query >= work.q.length)) != 0;
          }
          if constexpr (C.list_elements) {
            hidden = hidden || listed.at(n, half, column);
          } else if constexpr (C.user_mask) {
            hidden =
                hidden || !User::Mask::template visible<Position>(work.point_of(p, tile.head, query, key), p.extras);
          }
          if (hidden) score = -kInfinity;
        }
      }
    }
  }

  // |position of the query − position of the key|, rounded once, as Distances has it.
  __device__ __forceinline__ float distance(int query, int key) const {
    if constexpr (!C.alibi) return 0.0F;
    return fabsf(static_cast<float>(work.q_position + query - work.keys.position - key));
  }
};

/// Which elements of 16 keys by tile_q rows dropout keeps: byte k % 4 of word k / 4 is fragment k, whose bit
/// 4·side + 2·half + i is that of the left (0) or right (1) tile's query i and the upper (0) or lower (1) key.
template <FwdConfig C>
struct KeptOfKeys {
  static constexpr int words = divide_up(C.tile_q, 64);
  u32 word[words];

  __device__ __forceinline__ void draw(const KeyWork<C>& work, const DropoutDraws& draws, int first_key,
                                       const QueryTile& tile, int lane) {
    const u32 key = static_cast<u32>(work.keys.position) + work.first_key + first_key + lane / 4;
    const u32 row = static_cast<u32>(work.q_position) + tile.first + lane % 4 * 2;
    const bool aligned = key % 16 == static_cast<u32>(lane / 4) && row % 16 == static_cast<u32>(lane % 4 * 2);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int fragments = C.tile_q / 16 - w * 4 < 4 ? C.tile_q / 16 - w * 4 : 4;
      word[w] = 0;
      // Rolled: the generator's code is as long as a tile's products.
#pragma unroll 1
      for (int k = 0; k < fragments; ++k) {
        word[w] |= of_fragment(draws, key, row + (w * 4 + k) * 16, static_cast<u32>(tile.head), aligned) << (k * 8);
      }
    }
  }

  /// Whether value e of fragment k's left (0) or right (1) tile is kept.
  __device__ __forceinline__ bool keeps(int k, int side, int e) const {
    return (word[k / 4] >> (k % 4 * 8 + side * 4 + e) & 1) != 0;
  }

 private:
  // Aligned, a call serves both keys and, of one of the two neighbouring queries, both tiles.
  static __device__ __forceinline__ u32 of_fragment(const DropoutDraws& draws, u32 key, u32 row, u32 head,
                                                    bool aligned) {
    u32 kept = 0;
#pragma unroll 1
    for (u32 i = 0; i < 2; ++i) {
      const Philox random = draws.philox(key, row + i, head);
#pragma unroll 1
      for (u32 e = 0; e < 4; ++e) {
        const u32 half = e & 1;
        const u32 side = e / 2;
        const u32 at_key = key + 8 * half;
        const u32 at_row = row + i + 8 * side;
        const bool keeps = aligned ? random.draw(DropoutDraws::number(at_key, at_row)) < draws.threshold
                                   : draws.keeps(at_key, at_row, head);
        kept |= keeps ? 1U << (4 * side + 2 * half + i) : 0U;
      }
    }
    return kept;
  }
};

}  // namespace tessera::cuda
