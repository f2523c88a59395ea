// SPDX-License-Identifier: Apache-2.0
// Scores and dropout in transposed fragments, whose rows are keys: a thread has two keys and, of each tile of 8
// columns, two queries.
#pragma once

#include "cuda/attention/backward/query_range.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// Whether the user's mask is evaluated for the elements of a tile.
template <FwdConfig C>
__device__ __forceinline__ bool tests_mask(const QueryTile& tile) {
  return C.has_mask() && !(C.list_waives && tile.waived);
}

/// The elements of 16 keys by `rows` rows from `tile.first` on that the user's mask, or a list, hides. A thread has a
/// word for each of its two keys; bit 2n + column is that of its row `column` in the n-th 8 rows.
template <FwdConfig C, class Mask, int rows, int heads_a_tile>
struct HiddenElements {
  static_assert(!C.tests_elements() || rows <= 128);
  static_assert(heads_a_tile == 1 || !C.list_elements);      // the list is looked up by query
  static constexpr int columns_at_once = C.d > 192 ? 1 : 4;  // as registers allow
  u32 upper = 0, lower = 0;

  /// `Position`: the integer type in which the mask may compute.
  template <class Position>
  __device__ __forceinline__ void find(const FwdParams& p, const KeyWork<C, heads_a_tile>& work, const QueryTile& tile,
                                       int first_key, int lane) {
    const ListReader reader(p.list, work.batch, work.first_head + tile.head, work.kv_head);
    ListedKeys listed{reader};
    const auto row_of = [&](int i) { return tile.first + i / 2 * 8 + lane % 4 * 2 + i % 2; };
    if constexpr (C.list_elements) {  // a key at a time: its rows mostly share a block of the list
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        u32 found = 0;
#pragma unroll 1
        for (int i = 0; i < rows / 4; ++i) {
          found |= static_cast<u32>(hides<Position>(p, work, tile, row_of(i), first_key + half * 8, listed)) << i;
        }
        (half == 0 ? upper : lower) = found;
      }
    } else {
      // User code is long, and its loads take a while. What it computes of a row serves both keys.
#pragma unroll columns_at_once
      for (int i = 0; i < rows / 4; ++i) {
        upper |= static_cast<u32>(hides<Position>(p, work, tile, row_of(i), first_key, listed)) << i;
        lower |= static_cast<u32>(hides<Position>(p, work, tile, row_of(i), first_key + 8, listed)) << i;
      }
    }
  }
  /// Loads the same from the bits that an earlier kernel has computed.
  __device__ __forceinline__ void load(const FwdParams& p, const KeyWork<C, heads_a_tile>& work, const QueryTile& tile,
                                       int first_key, int lane) {
    static_assert(kMaskBlock % rows == 0 && heads_a_tile == 1 && C.segments == 1);
    const MaskBits& bits = p.list.mask_bits;
    const u32* words = bits.words + work.batch * bits.batch_stride + first_key * i64{bits.row_words} +
                       tile.first / kMaskBlock * 4 + lane % 4;
    const int shift = tile.first % kMaskBlock / 4;
    constexpr u32 all = 0xffffffffU >> (32 - rows / 4);
    upper = words[0] >> shift & all;
    lower = words[8 * i64{bits.row_words}] >> shift & all;
  }
  __device__ __forceinline__ bool at(int n, int half, int column) const {
    return ((half == 0 ? upper : lower) >> (n * 2 + column) & 1) != 0;
  }

 private:
  template <class Position>
  static __device__ __forceinline__ bool hides(const FwdParams& p, const KeyWork<C, heads_a_tile>& work,
                                               const QueryTile& tile, int row, int key, ListedKeys& listed) {
    if constexpr (C.list_elements) {
      if (key >= work.keys.extent.length || row >= work.q.length) return true;
      const ListClass found = listed.find(row, C.segments == 2 ? work.segment : 0, key);
      if (found != ListClass::partial) return found == ListClass::none;
    }
    if constexpr (C.user_mask) {
      return !Mask::template visible<Position>(work.point_of(p, tile.head, row, key), p.extras);
    }
    return false;
  }
};

/// FinishScores for transposed fragments, of 16 keys by `rows` rows from `tile.first` on.
template <FwdConfig C, class User, int rows = C.tile_q, int heads_a_tile = 1>
struct TransposedScores {
  static_assert(heads_a_tile == 1 || !C.scale_first);  // scores depend on queries, not on packed rows
  const FwdParams& p;
  const KeyWork<C, heads_a_tile>& work;
  int warp_row;  // first key of the warp within the block
  int lane;

  using Scores = Accumulator<1, rows / 8>;
  using Hidden = HiddenElements<C, typename User::Mask, rows, heads_a_tile>;

  /// Loads the bits of a tile that an earlier kernel has computed, for finish(). The caller may do so before it waits
  /// for the products.
  __device__ __forceinline__ Hidden load_hidden(const QueryTile& tile) const {
    Hidden hidden;
    if constexpr (has_mask_bits(C)) {
      if (tests_mask<C>(tile)) hidden.load(p, work, tile, first_key(), lane);
    }
    return hidden;
  }

  /// `cut`: interval masks or the ends of the sequences hide elements of the tile (KeyWork::is_cut), or with
  /// list_elements the list may. `differentiates`: `derivatives` with respect to the scaled products are computed too;
  /// those of hidden elements are undefined.
  template <bool differentiates>
  __device__ __forceinline__ void finish(Scores& s, Scores& derivatives, const QueryTile& tile, bool cut,
                                         Hidden hidden) const {
    const int first_key = this->first_key();
    const bool tests = C.list_elements || tests_mask<C>(tile);
    if (tests && !has_mask_bits(C)) {
      if (are_small<typename User::Mask>()) {
        hidden.template find<int>(p, work, tile, first_key, lane);
      } else {
        hidden.template find<i64>(p, work, tile, first_key, lane);
      }
    }
    if constexpr (C.scale_first) {
      if (are_small<typename User::Score>()) {
        change<int, differentiates>(s, derivatives, tile, first_key);
      } else {
        change<i64, differentiates>(s, derivatives, tile, first_key);
      }
    }
    if (cut) hide_cut(s, tile, first_key);
    if (tests) {
      for_each([&](int n, int half, int column) {
        if (hidden.at(n, half, column)) s.tile[0][n][half * 2 + column] = -kInfinity;
      });
    }
  }

 private:
  // The upper one of the thread's two keys.
  __device__ __forceinline__ int first_key() const { return work.first_key + warp_row + lane / 4; }
  template <class Use>
  static __device__ __forceinline__ void for_each(Use use) {
#pragma unroll
    for (int n = 0; n < rows / 8; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int half = 0; half < 2; ++half) use(n, half, column);
      }
    }
  }
  __device__ __forceinline__ int query_of(const QueryTile& tile, int n, int column) const {
    return tile.first + n * 8 + lane % 4 * 2 + column;
  }

  // Whether the callable may compute with positions of 32 bits.
  template <class Callable>
  __device__ __forceinline__ bool are_small() const {
    if constexpr (!Callable::uses_position) return false;
    return are_positions_small(p, work.q_position, work.q.length, work.keys);
  }

  // Turns products into scores, and computes their derivatives. `Position`: the integer type in which the callable may
  // compute.
  template <class Position, bool differentiates>
  __device__ __forceinline__ void change(Scores& s, Scores& derivatives, const QueryTile& tile, int first_key) const {
    // The point of the first element; the others are at offsets from it that the compiler knows.
    const ScorePoint corner = work.point_of(p, tile.head, query_of(tile, 0, 0), first_key);
    float slope = 0.0F;
    if constexpr (C.alibi) {
      slope = p.slopes[work.batch * p.slopes_batch + (work.first_head + tile.head) * p.slopes_head];
    }
    for_each([&](int n, int half, int column) {
      // This barrier keeps the loads of user code after it; earlier, each would take registers.
      if (C.user_score && half == 0 && column == 0) __syncwarp();
      const int query = query_of(tile, n, column);
      const int key = first_key + half * 8;
      float& score = s.tile[0][n][half * 2 + column];
      const auto point = [&] {
        ScorePoint at = corner;
        at.query += n * 8 + column;
        at.key += half * 8;
        return at;
      };
      if constexpr (differentiates) {
        derivatives.tile[0][n][half * 2 + column] =
            score_derivative_of<C, typename User::Score, Position>(score, p, point);
      }
      score = score_of<C, typename User::Score, Position>(score, p, slope, distance(query, key), point);
    });
  }

  // Hides elements outside of the sequences, or of the interval of rows that see their key.
  __device__ __forceinline__ void hide_cut(Scores& s, const QueryTile& tile, int first_key) const {
    // Of each key: the thread's first row relative to the first row that sees the key, and how many rows see it.
    // Unsigned, so that one comparison tests both ends.
    u32 first[2], count[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval seen = work.rows_of(first_key + half * 8);
      first[half] = static_cast<u32>(query_of(tile, 0, 0) - seen.begin);
      count[half] = static_cast<u32>(seen.end - seen.begin);
    }
    for_each([&](int n, int half, int column) {
      if (first[half] + n * 8 + column >= count[half]) s.tile[0][n][half * 2 + column] = -kInfinity;
    });
  }

  // |position of the query − position of the key|, rounded once, as in Distances.
  __device__ __forceinline__ float distance(int query, int key) const {
    if constexpr (!C.alibi) return 0.0F;
    return fabsf(static_cast<float>(work.q_position + query - work.keys.position - key));
  }
};

/// The elements of 16 keys by tile_q rows that dropout keeps. Byte k % 4 of word k / 4 is that of fragment k. Its bit
/// 4·side + 2·half + i is that of query i in the left (side 0) or right (1) tile, and of the upper (half 0) or lower
/// (1) key.
template <FwdConfig C>
struct KeptOfKeys {
  static constexpr int words = divide_up(C.tile_q, 64);
  // The number of Philox calls that are interleaved, as registers allow; each is a chain of ten products.
  static constexpr int at_once = C.d + C.dv > 192 ? 1 : 4;
  u32 word[words];

  __device__ __forceinline__ void draw(const KeyWork<C>& work, DropoutDraws draws, int first_key, const QueryTile& tile,
                                       int lane) {
    const u32 key = static_cast<u32>(work.keys.position) + work.first_key + first_key + lane / 4;
    const u32 row = static_cast<u32>(work.q_position) + tile.first + lane % 4 * 2;
    const u32 head = static_cast<u32>(tile.head);
    const bool aligned = key % 16 == static_cast<u32>(lane / 4) && row % 16 == static_cast<u32>(lane % 4 * 2);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int fragments = C.tile_q / 16 - w * 4 < 4 ? C.tile_q / 16 - w * 4 : 4;
      word[w] = 0;
      if (aligned) {
#pragma unroll at_once
        for (int k = 0; k < fragments; ++k) {
          word[w] |= of_aligned_fragment(draws, key, row + (w * 4 + k) * 16, head) << (k * 8);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < fragments; ++k) {
          word[w] |= of_fragment(draws, key, row + (w * 4 + k) * 16, head) << (k * 8);
        }
      }
    }
  }

  /// Whether value e of fragment k's left (0) or right (1) tile is kept.
  __device__ __forceinline__ bool keeps(int k, int side, int e) const {
    return (word[k / 4] >> (k % 4 * 8 + side * 4 + e) & 1) != 0;
  }

 private:
  // A Philox call draws for two neighbouring keys, which two lanes have. So each of these lanes calls for one of their
  // two neighbouring queries, and a shuffle gives each lane the bits of its own key.
  static __device__ __forceinline__ u32 of_aligned_fragment(const DropoutDraws& draws, u32 key, u32 row, u32 head) {
    const u32 odd = key & 1;
    const Philox random = draws.philox(key, row + odd, head);
    u32 kept[2] = {0, 0};  // of the even key and the odd one
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
#pragma unroll
      for (u32 side = 0; side < 2; ++side) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          const u32 draw = random.draw(DropoutDraws::number(i + 8 * half, 8 * side));
          kept[i] |= draw < draws.threshold ? 1U << (4 * side + 2 * half) : 0U;
        }
      }
    }
    const u32 own = odd != 0 ? kept[1] : kept[0];
    const u32 given = __shfl_xor_sync(0xffffffffU, odd != 0 ? kept[0] : kept[1], 4);
    return own << odd | given << (odd ^ 1);
  }
  static __device__ __forceinline__ u32 of_fragment(const DropoutDraws& draws, u32 key, u32 row, u32 head) {
    u32 kept = 0;
#pragma unroll 1
    for (u32 e = 0; e < 8; ++e) {
      const u32 i = e & 1;
      const u32 half = e / 2 & 1;
      const u32 side = e / 4;
      kept |= draws.keeps(key + 8 * half, row + i + 8 * side, head) ? 1U << e : 0U;
    }
    return kept;
  }
};

}  // namespace tessera::cuda
