// SPDX-License-Identifier: Apache-2.0
// Scores that are linear in the distance of key and query, s + slope · (key − query). The bias has two parts: the
// difference of each column from the tile's first is added to the products by one FMA each; the bias of the first
// column is subtracted from the origins of rows.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/row_shift.cuh"
#include "cuda/attention/scores/text_functions.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// What linear scores require of a configuration.
template <class Config>
concept LinearScoreConfig = requires(const Config& c) {
  int{c.tile_kv};
  int{c.segments};
  bool{c.gathers()};
  bool{c.alibi};
  bool{c.linear_score};
};

/// The linear scores of a thread's two rows, which may belong to two heads. Used only with linear_score. The distance
/// of a key is counted from the query's position, clamped to the range of the keys. So it is an integer, at most the
/// sequence's length. The clamp changes all scores of a row by the same number, which finish_origins() adds once.
template <LinearScoreConfig auto C, class Score>
struct LinearScore {
  static_assert(C.segments == 1);

  const AttentionParams& p;
  u32 memory;  // 16 bytes of shared memory for the two rows
  int row;     // the upper one, packed
  int lane;

  /// Finds the slopes and distances of a row tile's rows, and stores them to shared memory.
  template <class Work>
  __device__ __forceinline__ void begin(const Work& work) const {
    const Segment& keys = work.sequence.segment(0);
    const int half = lane % 2;  // even lanes have the upper row, odd ones the lower
    const PackedRow at(row + half * 8, p.group);
    const ScorePoint point = point_of(p, work, at, keys.position);
    const float steepness = slope_at(work, at, point) / p.scale;
    const auto ahead = static_cast<int>(keys.position - nearest(point.query, keys));
    const float others = __shfl_xor_sync(0xffffffffU, steepness, 1);
    const int others_ahead = __shfl_xor_sync(0xffffffffU, ahead, 1);
    __syncwarp();  // all lanes have read those of the previous row tile
    if (lane % 4 == 0) {
      const float bits[4] = {steepness, others, __int_as_float(ahead), __int_as_float(others_ahead)};
      ptx::store_shared_16(memory, bits);
    }
    __syncwarp();
  }

  /// Adds the bias of each column relative to the tile's first to the products. Returns the bias of the first column,
  /// in units of log2. In steep rows this would round scores too much: their bias is NaN, and their scores are to be
  /// computed again by whole().
  template <class Work, int key_tiles>
  __device__ __forceinline__ LinearShift change(const Work& work, Accumulator<1, key_tiles>& s,
                                                const KvTile& tile) const {
    if constexpr (C.gathers()) {  // granules may be far apart
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        const int column = n * 8 + work.tiles.moved(tile, n * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = s.tile[0][n][i];
          score = whole(score, i / 2, column + tile.first + i % 2);
        }
      }
      return {{{0.0F, 0.0F}}, true, false};
    }
    const Rows rows = load();
    bool steep = false;
    LinearShift shift;
    shift.is_scaled = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_first = __fmul_rn(slope(rows, half), static_cast<float>(rows.ahead[half] + tile.first));
      shift.by[half] = is_steep(rows, half) ? __int_as_float(0x7fffffff) : of_first;
      steep |= is_steep(rows, half);
    }
    shift.recomputes = __any_sync(0xffffffffU, steep) != 0;
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s.tile[0][n][i];
        score = __fmaf_rn(rows.steepness[i / 2], static_cast<float>(n * 8 + i % 2), score);
      }
    }
    return shift;
  }

  /// Finds which rows are steep: the scores of their columns that are far from the nearest key would be rounded by more
  /// than 2^-24 · 4 · tile_kv.
  __device__ __forceinline__ void find_steep(bool (&steep)[2]) const {
    const Rows rows = load();
    steep[0] = is_steep(rows, 0);
    steep[1] = is_steep(rows, 1);
  }
  /// Turns a product into a scaled score with the whole bias. `column`: key of the product, relative to the thread's
  /// first column. The score of the nearest key is as exact as without a bias.
  __device__ __forceinline__ float whole(float product, int half, int column) const {
    const Rows rows = load();
    const auto distance = static_cast<float>(rows.ahead[half] + column);
    return __fmaf_rn(product, p.scale * kLog2E, __fmul_rn(slope(rows, half), distance));
  }

  /// Adds the bias of the query's distance from its nearest key to the origins, after the row tile's last keys.
  template <class Work, class Softmax>
  __device__ __forceinline__ void finish_origins(const Work& work, Softmax& softmax) const {
    const Rows rows = load();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 query = work.sequence.q_position + PackedRow(row + half * 8, p.group).query;
      const i64 rest = nearest(query, work.sequence.segment(0)) - query;
      if (rest != 0) softmax.origin[0][half] += slope(rows, half) * static_cast<float>(rest);
    }
  }

 private:
  struct Rows {
    float steepness[2];  // slope / scale: what each further key adds to a product
    int ahead[2];        // distance of the thread's first column in a tile that begins at key 0
  };
  __device__ __forceinline__ Rows load() const {
    float bits[4];
    ptx::load_shared_16(bits, memory);
    const int column = lane % 4 * 2;
    return {{bits[0], bits[1]}, {__float_as_int(bits[2]) + column, __float_as_int(bits[3]) + column}};
  }
  /// In units of log2.
  __device__ __forceinline__ float slope(const Rows& rows, int half) const {
    return rows.steepness[half] * (p.scale * kLog2E);
  }
  __device__ __forceinline__ bool is_steep(const Rows& rows, int half) const {
    return !(fabsf(slope(rows, half)) <= 4.0F * kLog2E);  // true for NaN, too
  }
  /// Returns the slope of ALiBi, for which no query may see a later key, or that of the user's text.
  template <class Work>
  __device__ __forceinline__ float slope_at(const Work& work, const PackedRow& at, const ScorePoint& point) const {
    if constexpr (C.alibi) {
      return p.slopes[work.block.batch * p.slopes_batch + (work.block.head + at.head) * p.slopes_head];
    } else {
      return Score::template slope<i64>(AskedSlope{}, point, p.extras).value;
    }
  }
  static __device__ __forceinline__ i64 nearest(i64 query, const Segment& keys) {
    return min(max(query, keys.position), keys.position + keys.extent.length);
  }
};

}  // namespace tessera::cuda
