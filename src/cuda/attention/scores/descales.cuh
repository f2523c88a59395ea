// SPDX-License-Identifier: Apache-2.0
// Descales of operands of 8 bits (docs/quantization.md): the factors and summands that turn products of Q and K into
// scores.
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/row_shift.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "cuda/tile/swizzle.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// With FwdConfig::descales_at_once(): factors of a row tile. product: of Q·Kᵀ before masks and maxima; score: after
/// these; value: of the outputs.
template <bool at_once>
struct Descales {};
template <>
struct Descales<true> {
  float product, score, value;
};

/// Returns a descale by head. `at`: address of that of the first sequence and head; `batch`, `head`: strides.
template <class Work>
__device__ __forceinline__ float head_descale(const Work& work, const float* at, i64 batch, i64 head) {
  return at[work.block.batch * batch + work.block.kv_head * head];
}

/// Returns the descale of a row tile's products, by head.
template <class Work>
__device__ __forceinline__ float product_descale(const DescaleParams& d, const Work& work) {
  return head_descale(work, d.q, d.q_batch, d.q_head) * head_descale(work, d.k, d.k_batch, d.k_head);
}

// Fused scores are off by the rounding of their origin, all scores of a row by the same. P of e4m3 has room for half an
// octave. Products are at most 448²·d. So the factor is not fused if half a unit in the last place of such a score may
// be more than half an octave.
template <FwdConfig C, class Work>
__device__ __forceinline__ void find_descales(const AttentionParams& p, const DescaleParams& d, Work& work) {
  constexpr float kLargestFused = 0x1p23F / (448.0F * 448.0F * C.d);
  const float product = product_descale(d, work);
  const float score = C.scale_first ? 1.0F : p.scale * kLog2E * product;
  const bool fuses = !C.scale_first && (!C.multiplies_bytes() || fabsf(score) <= kLargestFused);
  work.product = C.scale_first ? product : fuses ? 1.0F : score;
  work.score = fuses ? score : 1.0F;
  work.value = C.eight_bits ? head_descale(work, d.v, d.v_batch, d.v_head) : 1.0F;
}

/// Returns the address of a key's descale, by block or token; `key` is below the sequence's length.
template <FwdConfig C, class Work>
__device__ __forceinline__ const float* key_descale(const AttentionParams& p, const DescaleParams& d, const Work& work,
                                                    int key) {
  const int first = work.sequence.first.extent.first;
  const float* of_head = d.k + work.block.kv_head * d.k_head;
  if constexpr (C.source == Source::paged) {
    const KvPages pages(p.kv[0], first, work.block.batch);
    const int entry = ptx::divide(key, p.kv[0].page_size);
    const int within = key - entry * static_cast<int>(p.kv[0].page_size.value);
    return of_head + pages.at<C.trusts>(entry) * d.k_batch + ptx::divide(within, d.tokens);
  }
  const int token = key + (d.packed_k ? first : 0);
  return of_head + work.block.batch * d.k_batch + ptx::divide(token, d.tokens);
}

/// Converts products of int8 to products of the original numbers. With descales_rows() each row has a factor and a
/// summand, which is the product of the row with the mean of K. With descales_keys each key has a factor. All of them
/// are in shared memory.
template <FwdConfig C>
struct Int8Scores {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using Sums = Accumulator<row_tiles, C.tile_kv / 8, int>;
  using Scores = Accumulator<row_tiles, C.tile_kv / 8>;

  u32 memory;  // descale_bytes() of it

  /// Addresses of what belongs to a row of the block, and to a key of the tile that is `use`-th in the ring.
  __device__ __forceinline__ u32 row_at(int row) const { return memory + static_cast<u32>(row) * 8; }
  __device__ __forceinline__ u32 key_at(int use, int column) const {
    const u32 of_tile = static_cast<u32>(use) % C.stages * C.tile_descales();
    return memory + C.tile_q * 8 + (of_tile + static_cast<u32>(column) / C.keys_a_descale) * 4;
  }

  /// The initial value of sums of products. Near the float 0x4B400000, which is 1.5 · 2^23, floats are integers: up to
  /// 2^22 to either side, adding an integer to the bits adds it to the number. So a subtraction converts sums of up to
  /// 256 products, which is faster than a conversion instruction. The instruction is used for more products, and with
  /// wgmma, which would need the initial value in every register.
  static constexpr int kFirst = C.products == Products::mma_sync && C.d <= 256 ? 0x4B400000 : 0;
  static __device__ __forceinline__ float number(int sum) {
    if constexpr (kFirst == 0) return __int2float_rn(sum);
    return __int_as_float(sum) - __int_as_float(kFirst);
  }

  /// Converts the products of a warp's rows and of the tile that is `use`-th in the ring to scores, up to the factors
  /// that the softmax applies.
  template <class Work>
  __device__ __forceinline__ void convert(Scores& s, const Sums& products, const Work& work, int use, int warp_row,
                                          int lane) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      Factors factors(*this, use, warp_row + m * 16, lane);
#pragma unroll
      for (int n = 0; n < C.tile_kv / 8; ++n) factors.convert(s.tile[m][n], products.tile[m][n], n);
    }
    if constexpr (C.scale_first && !C.descales_rows()) s.scale(work.product);
  }

  /// The factors of 16 rows of a tile, for eight columns at a time, in order: the factors of keys, and those of rows
  /// unless folds_rows().
  struct Factors {
    static constexpr bool of_rows = C.descales_rows() && !C.folds_rows();
    static constexpr bool of_each_key = C.descales_keys && C.keys_a_descale == 1;
    u32 keys;
    float of_row[2];
    float summand[2];
    float factor[2];  // of a row, or of a row and columns that share a descale

    __device__ __forceinline__ Factors(const Int8Scores& scores, int use, int row, int lane)
        : keys(scores.key_at(use, of_each_key ? lane % 4 * 2 : 0)) {
      if constexpr (of_rows) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::load_shared_8(of_row[half], summand[half], scores.row_at(row + half * 8 + lane / 4));
          factor[half] = of_row[half];
        }
      }
    }
    /// Converts the eight columns from 8 · n on.
    __device__ __forceinline__ void convert(float (&s)[4], const int (&products)[4], int n) {
      float of_key[2];
      if constexpr (of_each_key) {
        ptx::load_shared_8(of_key[0], of_key[1], keys + static_cast<u32>(n) * 32);
      } else if constexpr (of_rows && C.descales_keys) {
        if (n * 8 % C.keys_a_descale == 0) {
          const float of_columns = ptx::load_shared_4(keys + static_cast<u32>(n) * 8 / C.keys_a_descale * 4);
          factor[0] = of_row[0] * of_columns;
          factor[1] = of_row[1] * of_columns;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[i] = number(products[i]);
        if constexpr (of_each_key) s[i] *= of_key[i % 2];
        if constexpr (of_rows) s[i] = C.smooth ? __fmaf_rn(s[i], factor[i / 2], summand[i / 2]) : s[i] * factor[i / 2];
      }
    }
  };

  /// With folds_rows(): the factors and summands that the softmax applies instead, for a thread's rows, and for columns
  /// of a tile that share a descale.
  __device__ __forceinline__ auto row_scale(int use, int warp_row, int lane) const {
    RowScale rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::load_shared_8(rows.factor[half], rows.by[half], row_at(warp_row + half * 8 + lane / 4));
    }
    if constexpr (C.keys_a_descale > 1) {
      return ColumnScale<C.keys_a_descale>{rows, key_at(use, 0)};
    } else {
      return rows;
    }
  }

  /// Finds the factors and summands of a warp's rows; each warp calls this for its own. With folds_rows() they are in
  /// units of log2. `q`, `q_row`: the tile of Q in shared memory and the warp's first row there; `warp_row`: that row's
  /// number in the block. Rows that are not used have a descale of 1.
  template <class QTile, class Work>
  __device__ __forceinline__ void find_rows(const AttentionParams& p, const DescaleParams& d, const Work& work, u32 q,
                                            int q_row, int warp_row, int lane) const {
    constexpr int rows = C.rows_a_warp();
    const int row = lane % rows;  // with 16 rows, two lanes share a row
    const PackedRow at(work.block.first_row + warp_row + row, p.group);
    const bool is_used = at.query < work.sequence.q.length;
    float sum = 0.0F;
    if constexpr (C.smooth) {
      sum = is_used ? times_mean<QTile>(p, d, work, q, q_row + row, lane / rows) : 0.0F;
      if constexpr (rows == 16) sum += __shfl_xor_sync(0xffffffffU, sum, 16);
    }
    float of_query = 1.0F;
    float factor = 1.0F;
    if (is_used) {
      of_query = query_descale(d, work, at);
      factor = of_query;
      if constexpr (!C.descales_keys) factor *= head_descale(work, d.k, d.k_batch, d.k_head);
    }
    const float scale = C.folds_rows() ? p.scale * kLog2E : 1.0F;
    ptx::store_shared_8(row_at(warp_row + row), factor * scale, sum * of_query * scale);
    __syncwarp();
  }

  /// Copies the descales of a tile's keys by cp.async, with zeros behind the end of the sequence; `threads` threads
  /// call this. key_of(column): the key of a column.
  template <int threads, class Work, class KeyOf>
  __device__ __forceinline__ void copy_keys(const AttentionParams& p, const DescaleParams& d, const Work& work, int use,
                                            int thread, KeyOf key_of) const {
#pragma unroll
    for (int first = 0; first < C.tile_kv; first += threads) {
      const int column = first + thread;
      if (C.tile_kv % threads != 0 && column >= C.tile_kv) break;
      const int key = key_of(column);
      const bool is_key = key < work.sequence.first.extent.length;
      ptx::cp_async_4_or_zeros(key_at(use, column), key_descale<C>(p, d, work, is_key ? key : 0), is_key);
    }
  }
  /// The same by a warp, whose loads are in flight together. Behind the end it stores any descale that is positive and
  /// finite, so that hidden scores stay −∞.
  template <TileWork Work>
  __device__ __forceinline__ void load_keys(const AttentionParams& p, const DescaleParams& d, const Work& work,
                                            const KvTile& tile, int use, int lane) const {
    constexpr int count = C.tile_descales();
    constexpr int steps = divide_up(count, 32);
    float loaded[steps];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int key = work.tiles.key(tile, min(i * 32 + lane, count - 1) * C.keys_a_descale);
      loaded[i] = *key_descale<C>(p, d, work, min(key, work.sequence.first.extent.length - 1));
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int index = i * 32 + lane;
      if (count % 32 == 0 || index < count) {
        ptx::store_shared_4(key_at(use, index * C.keys_a_descale), __float_as_uint(loaded[i]));
      }
    }
  }

 private:
  template <class Work>
  static __device__ __forceinline__ float query_descale(const DescaleParams& d, const Work& work, const PackedRow& at) {
    if constexpr (!C.descales_keys) return head_descale(work, d.q, d.q_batch, d.q_head);
    const int token = at.query + (d.packed_q ? work.sequence.q.first : 0);
    return d.q[work.block.batch * d.q_batch + (work.block.head + at.head) * d.q_head + ptx::divide(token, d.tokens)];
  }

  /// Returns the product of a row of quantised Q with the mean of K; with 16 rows a warp, of every other four columns.
  template <class QTile, class Work>
  static __device__ __forceinline__ float times_mean(const AttentionParams& p, const DescaleParams& d, const Work& work,
                                                     u32 q, int row, int part) {
    constexpr int parts = 32 / C.rows_a_warp();
    const float* mean = d.mean + work.block.batch * d.mean_batch + work.block.kv_head * d.mean_head;
    float sum = 0.0F;
#pragma unroll 1
    for (int word = part; word * 4 < p.d; word += parts) {
      const u32 bytes = __float_as_uint(ptx::load_shared_4(q + QTile::at(row, word / 4) + word % 4 * 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto element = static_cast<signed char>(bytes >> (i * 8));
        sum = __fmaf_rn(__int2float_rn(element), mean[word * 4 + i], sum);
      }
    }
    return sum;
  }
};

}  // namespace tessera::cuda
