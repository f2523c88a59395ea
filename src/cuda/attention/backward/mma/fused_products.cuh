// SPDX-License-Identifier: Apache-2.0
// The products of the one pass by mma.sync, and how warps share them. P and dS go through shared memory, so that a warp
// computes 32 rows of a result (16 of dQ if d is not a multiple of 64). With 16 rows a warp could keep P and dS in
// registers, but would read more operands from shared memory (docs/kernels.md, section 12).
#pragma once

#include "cuda/attention/backward/mma/key_pass.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace tessera::cuda {

template <BwdConfig B, class User>
struct FusedProducts : KeyPass<B, User, true, true> {
  using Base = KeyPass<B, User, true, true>;
  using Base::C;
  using Base::work;
  using typename Base::KTile;
  /// Pᵀ or dSᵀ.
  using SharedScores = SharedTile<C.type, C.tile_kv, C.tile_q>;
  struct Memory : Base::Memory {
    NonFiniteRows<B.type, C.tile_kv> own_non_finite;
    KeyPart part;
  };
  static_assert(sizeof(Memory) <= FwdConfig::kWorkBytes);

  // A warp computes scores of 32 keys by score_rows rows, and dK and dV of 32 keys by every column_warps-th 16 columns.
  static constexpr int column_warps = B.column_warps();
  static constexpr int score_rows = C.tile_q / column_warps;
  // It computes dQ of query_rows rows by every query_columns-th 16 columns.
  static constexpr int query_rows = B.d % 64 == 0 ? 32 : 16;
  static constexpr int query_columns = C.warps / (C.tile_q / query_rows);
  static_assert(B.d / 16 % query_columns == 0 && (C.tile_q % kSumRows == 0 || kSumRows % C.tile_q == 0));

  template <int columns>
  struct Gradient {
    static constexpr int pairs = columns / 16 / column_warps;
    Accumulator<1, 2 * pairs> keys[2];  // 16 keys each
  };
  using Scores = Accumulator<1, score_rows / 8>;  // of 16 keys
  struct QueryGradients {
    static constexpr int pairs = C.d / 16 / query_columns;
    Accumulator<1, 2 * pairs> rows[query_rows / 16];  // 16 rows each

    __device__ __forceinline__ void clear() {
#pragma unroll
      for (auto& sum : rows) sum.clear();
    }
  };

  // Each function computes these again: values that are kept would take registers from accumulators.
  struct Place {
    int thread, lane;
    int first_key;    // first of the warp's 32 keys
    int column_warp;  // number among the warps that share these keys
    int first_row;    // first row of the warp's scores

    __device__ __forceinline__ int first_query() const { return thread / 32 / query_columns * query_rows; }
    __device__ __forceinline__ int query_column() const { return thread / 32 % query_columns; }
  };
  static __device__ __forceinline__ Place place() {
    const int thread = ptx::afresh(static_cast<int>(threadIdx.x));
    __builtin_assume(thread >= 0);  // otherwise remainders take three more instructions
    const int warp = thread / 32;
    return {thread, thread % 32, warp / column_warps * 32, warp % column_warps, warp % column_warps * score_rows};
  }

  __device__ __forceinline__ u32 probabilities_base() const { return Base::exchange_base(); }
  __device__ __forceinline__ u32 gradients_base() const { return probabilities_base() + SharedScores::bytes; }
  __device__ __forceinline__ const KeyPart& part() const { return static_cast<const Memory&>(work).part; }
  __device__ __forceinline__ auto& own_non_finite() const { return static_cast<Memory&>(work).own_non_finite; }

  struct Nothing {
    __device__ __forceinline__ void operator()(int /*k*/) const {}
  };
  // S = A·Bᵀ of the warp's keys and rows, over `columns`; beside(k) is called after every 16 of these.
  template <class ATile, class BTile, int columns, class Beside = Nothing>
  __device__ __forceinline__ void product(Scores (&s)[2], u32 keys_at, u32 rows_at, Beside beside = {}) const {
    const Place own = place();
    s[0].clear();
    s[1].clear();
    const u32 keys = rows_address<ATile>(keys_at, own.first_key, own.lane);
    const u32 rows = keys_address<BTile>(rows_at + BTile::rows_below(own.first_row), own.lane);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      u32 a[2][4];
      load_rows<ATile>(a, keys, k);
#pragma unroll
      for (int n = 0; n < score_rows / 16; ++n) {
        u32 b[4];
        ptx::ldmatrix_x4(b, BTile::chunk_pair(rows, k) + BTile::rows_below(n * 16));
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply(s[m], n, a[m], b);
      }
      beside(k);
    }
  }

  template <int tiles>
  static __device__ __forceinline__ void multiply(Accumulator<1, tiles>& sum, int pair, const u32 (&a)[4],
                                                  const u32 (&b)[4]) {
    ptx::mma_m16n8k16<B.type>(sum.tile[0][2 * pair], a, b[0], b[1]);
    ptx::mma_m16n8k16<B.type>(sum.tile[0][2 * pair + 1], a, b[2], b[3]);
  }

  __device__ __forceinline__ void share(const Scores (&s)[2], u32 to) const {
    const Place own = place();
    to += own.lane % 4 * 4;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const u32 at =
          SharedScores::chunk_pair(to + SharedScores::at(own.first_key + own.lane / 4, side), own.first_row / 16);
#pragma unroll
      for (int n = side; n < score_rows / 8; n += 2) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float(&four)[4] = s[m].tile[0][n];
          const u32 key = SharedScores::chunk_pair(at, n / 2) + SharedScores::rows_below(m * 16);
          ptx::store_shared_4(key, ptx::pack<B.type>(four[0], four[1]));
          ptx::store_shared_4(key + SharedScores::rows_below(8), ptx::pack<B.type>(four[2], four[3]));
        }
      }
    }
  }

  // Adds the product of Pᵀ or dSᵀ with a tile of rows; beside(k) is called after every 16 rows.
  template <class Tile, class Beside = Nothing>
  __device__ __forceinline__ void add(Gradient<Tile::columns>& sum, u32 scores_at, u32 rows_at,
                                      Beside beside = {}) const {
    const Place own = place();
    const u32 scores = rows_address<SharedScores>(scores_at, own.first_key, own.lane);
    const u32 columns = Tile::chunk_pair(values_address<Tile>(rows_at, own.lane), own.column_warp);
#pragma unroll
    for (int k = 0; k < C.tile_q / 16; ++k) {
      u32 a[2][4];
      load_rows<SharedScores>(a, scores, k);
#pragma unroll
      for (int n = 0; n < Gradient<Tile::columns>::pairs; ++n) {
        u32 b[4];
        ptx::ldmatrix_x4_transposed(b, Tile::chunk_pair(columns, n * column_warps) + Tile::rows_below(k * 16));
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply(sum.keys[m], n, a[m], b);
      }
      beside(k);
    }
  }

  // Computes the warp's part of dQ = dS·K.
  __device__ __forceinline__ void find_dq(QueryGradients& dq) const {
    const Place own = place();
    const u32 gradients =
        SharedScores::chunk_pair(keys_address<SharedScores>(gradients_base(), own.lane), own.first_query() / 16);
    const u32 keys = KTile::chunk_pair(values_address<KTile>(Base::k_base, own.lane), own.query_column());
    dq.clear();
#pragma unroll
    for (int k = 0; k < C.tile_kv / 16; ++k) {
      u32 a[query_rows / 16][4];
#pragma unroll
      for (int m = 0; m < query_rows / 16; ++m) {
        ptx::ldmatrix_x4_transposed(a[m], SharedScores::chunk_pair(gradients, m) + SharedScores::rows_below(k * 16));
      }
#pragma unroll
      for (int n = 0; n < QueryGradients::pairs; ++n) {
        u32 b[4];
        ptx::ldmatrix_x4_transposed(b, KTile::chunk_pair(keys, n * query_columns) + KTile::rows_below(k * 16));
#pragma unroll
        for (int m = 0; m < query_rows / 16; ++m) multiply(dq.rows[m], n, a[m], b);
      }
    }
  }

  // Replaces values of K that are not finite by zeros, because dQ of a row sums over all keys of the block. Returns
  // whether there were any; poison_own() then sets the visible scores of these keys to NaN.
  __device__ __forceinline__ bool replace_own() const {
    const int thread = place().thread;
    auto& rows = own_non_finite();
    const bool finite = rows.template are_finite<C.threads(), KTile>(Base::k_base, thread);
    if (__syncthreads_or(finite ? 0 : 1) == 0) return false;
    rows.clear(thread);
    __syncthreads();
    rows.template replace<C.threads(), KTile>(Base::k_base, rows.first, thread);
    __syncthreads();
    return true;
  }
  __device__ __forceinline__ void poison_own(Scores (&s)[2]) const {
    const Place own = place();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (own_non_finite().of(own.first_key + m * 16 + half * 8 + own.lane / 4) == 0) continue;
#pragma unroll
        for (int n = 0; n < score_rows / 8; ++n) {
#pragma unroll
          for (int column = 0; column < 2; ++column) {
            float& score = s[m].tile[0][n][half * 2 + column];
            if (score != -kInfinity) score = kNaN;
          }
        }
      }
    }
  }
};

}  // namespace tessera::cuda
