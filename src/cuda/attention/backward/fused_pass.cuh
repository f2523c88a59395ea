// SPDX-License-Identifier: Apache-2.0
// The backward in one pass, by mma.sync: dK and dV of a block's keys, as in key_pass.cuh, and the block's share of each
// tile's dQ, which is added to sums in memory (query_sums.cuh):
//
//     Sᵀ = K·Qᵀ    Pᵀ = exp2(Sᵀ − LSE)    dPᵀ = V·dOᵀ    dSᵀ = Pᵀ ∘ (dPᵀ − δ)    dV += Pᵀ·dO    dK += dSᵀ·Q    dQ = dS·K
//
// P and dS go through shared memory, so that a warp has 32 rows of every product's result and as many columns, or more:
// 16 rows, whose fragments a warp could keep in registers, would read shared memory half as often again.
#pragma once

#include "cuda/attention/backward/key_pass.cuh"
#include "cuda/attention/backward/query_sums.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/warpgroup.cuh"

namespace tessera::cuda {

template <BwdConfig B, class User>
struct FusedPass : KeyPass<B, User, true, true> {
  using Base = KeyPass<B, User, true, true>;
  using Base::C;
  using Base::p;
  using Base::params;
  using Base::work;
  using typename Base::KTile;
  using typename Base::OTile;
  using typename Base::QTile;
  using typename Base::VTile;
  using typename Base::Walk;
  /// Pᵀ or dSᵀ.
  using SharedScores = SharedTile<C.type, C.tile_kv, C.tile_q>;
  struct Memory : Base::Memory {
    NonFiniteRows<B.type, C.tile_kv> own_non_finite;
  };
  static_assert(sizeof(Memory) <= FwdConfig::kWorkBytes);

  // Of scores a warp has 32 keys and score_rows rows, of dK and dV 32 keys and every column_warps-th 16 columns.
  static constexpr int column_warps = B.column_warps();
  static constexpr int score_rows = C.tile_q / column_warps;
  // Of dQ it has query_rows rows and every query_columns-th 16 columns.
  static constexpr int query_rows = B.d % 64 == 0 ? 32 : 16;
  static constexpr int query_columns = C.warps / (C.tile_q / query_rows);
  static_assert(B.d / 16 % query_columns == 0 && C.tile_q % kSumRows == 0);

  template <int columns>
  struct Gradient {
    static constexpr int pairs = columns / 16 / column_warps;
    Accumulator<1, 2 * pairs> keys[2];  // 16 each
  };
  using Scores = Accumulator<1, score_rows / 8>;  // of 16 keys
  struct QueryGradients {
    static constexpr int pairs = C.d / 16 / query_columns;
    Accumulator<1, 2 * pairs> rows[query_rows / 16];  // 16 each

    __device__ __forceinline__ void clear() {
#pragma unroll
      for (auto& sum : rows) sum.clear();
    }
  };

  // Computed again by each function: kept, they would take registers that sums and scores want.
  struct Place {
    int thread, lane;
    int first_key;    // of the warp's 32
    int column_warp;  // of those that share keys
    int first_row;    // of the warp's scores

    __device__ __forceinline__ int first_query() const { return thread / 32 / query_columns * query_rows; }
    __device__ __forceinline__ int query_column() const { return thread / 32 % query_columns; }
  };
  static __device__ __forceinline__ Place place() {
    const int thread = ptx::afresh(static_cast<int>(threadIdx.x));
    __builtin_assume(thread >= 0);  // else remainders take three instructions more
    const int warp = thread / 32;
    return {thread, thread % 32, warp / column_warps * 32, warp % column_warps, warp % column_warps * score_rows};
  }

  __device__ __forceinline__ u32 probabilities_base() const { return Base::exchange_base(); }
  __device__ __forceinline__ u32 gradients_base() const { return probabilities_base() + SharedScores::bytes; }
  __device__ __forceinline__ auto& own_non_finite() const { return static_cast<Memory&>(work).own_non_finite; }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned; `index`: of the block's keys.
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory, int index) {
    KeyWork<C> work;
    if (!work.find(params, index)) return;
    Memory& kept = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) static_cast<KeyWork<C>&>(kept) = work;
    FusedPass{{params, params.forward, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes}}.compute(work);
  }

  /// `first`: the same as `work`, before a barrier makes that readable.
  __device__ __forceinline__ void compute(const KeyWork<C>& first) const {
    Gradient<C.d> dk;
    Gradient<C.dv> dv;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      dk.keys[m].clear();
      dv.keys[m].clear();
    }
    const int count = Base::count_tiles(first);
    if (count > 0) {
      Base::load_keys(first);
      Walk walk = begin_walk<B>(typename Base::Listed{params, first});
      QueryTile tile = first_tile(first, walk);
      Stream stream = stream_from(first, tile);
      load_queries(first, stream, tile, 0);
      load_gradients(first, stream, tile, 0);
      ptx::cp_async_commit();
      QueryGradients dq;
      dq.clear();
      float* sums = sums_of(first, tile);  // where dq is added
      bool own_replaced = false;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is here, and nobody reads the one before any more
        QueryTile next = tile;
        const bool has_next = i + 1 < count;
        if (has_next) next = move(stream, tile, walk);
        if (B.stages > 1 && has_next) {
          load_queries(work, stream, next, i + 1);
          load_gradients(work, stream, next, i + 1);
        }
        ptx::cp_async_commit();
        if (i == 0) own_replaced = replace_own();
        // What is added to memory is added between the steps of a product, whose tensor cores do not wait for it.
        Scores s[2];
        product<KTile, QTile, C.d>(s, Base::k_base, Base::q_base(i), [&](int k) {
          if constexpr (B.stages == 1) add_to_sums(dq, sums, k, C.d / 16);
        });
        share_scores(s, tile, i, own_replaced);
        await_scores_of_keys();
        add<OTile>(dv, probabilities_base(), Base::o_base(i));
        __syncthreads();  // dS of all keys is here, and nobody reads dO any more
        if constexpr (B.stages > 1) {
          find_queries(dq);
          __syncwarp();  // loads stay behind it: each takes registers
          add<QTile>(dk, gradients_base(), Base::q_base(i),
                     [&](int k) { add_to_sums(dq, sums, k, C.tile_q / 16); });
          if (has_next) sums = sums_after(sums, tile, next);
        } else {
          if (has_next) load_gradients(work, stream, next, i + 1);
          add<QTile>(dk, gradients_base(), Base::q_base(i));
          __syncthreads();  // nobody reads Q any more
          if (has_next) load_queries(work, stream, next, i + 1);
          ptx::cp_async_commit();
          find_queries(dq);
          if (i > 0) sums = sums_of(work, tile);
        }
        tile = next;
      }
      if constexpr (B.stages == 1) add_to_sums(dq, sums, 0, 1);
      ptx::cp_async_wait<0>();
    } else {
      __syncthreads();  // the block's work is here, which loops wait for
    }
    store(dk, params.dk[work.segment], p.d, p.scale);
    store(dv, params.dv[work.segment], p.dv, 1.0F);
  }

  // P and dS of the warp's keys, by all rows.
  static __device__ __forceinline__ void await_scores_of_keys() {
    ptx::barrier_sync(1 + place().first_key / 32, column_warps * 32);
  }

  // Where a tile of rows comes from: its first row of Q and of dO, and how far its first row value lies from the first.
  struct Stream {
    const char* q;
    const char* dout;
    i64 value;
  };
  __device__ __forceinline__ Stream stream_from(const KeyWork<C>& w, const QueryTile& tile) const {
    const auto first_of = [&](const void* tensor, const Strides& strides) {
      return static_cast<const char*>(tensor) +
             2 * (w.batch * strides.batch + (w.q.first + i64{tile.first}) * strides.row +
                  (w.first_head + tile.head) * strides.head);
    };
    return {first_of(p.q, p.q_strides), first_of(params.dout, params.dout_strides),
            (w.first_head + tile.head) * params.values.rows + first_value(p, w.q, w.batch) + tile.first};
  }
  __device__ __forceinline__ QueryTile first_tile(const KeyWork<C>& first, PassedWalk<B> walk) const {
    if constexpr (B.has_list()) return listed_tile(first, walk);
    return first.tile(0);
  }
  __device__ __forceinline__ QueryTile listed_tile(const KeyWork<C>& w, PassedWalk<B> walk) const {
    return typename Base::Listed{params, w}.next(walk, place().lane);
  }
  // On to the next tile, which nearly always is of the same head.
  __device__ __forceinline__ QueryTile move(Stream& stream, const QueryTile& from, PassedWalk<B> walk) const {
    QueryTile to;
    if constexpr (B.has_list()) {
      to = listed_tile(work, walk);
    } else {
      to = work.after(from);
    }
    if (to.head == from.head) {
      const int rows = to.first - from.first;
      stream.q = ptx::advance(stream.q, rows, static_cast<int>(2 * p.q_strides.row));
      stream.dout = ptx::advance(stream.dout, rows, static_cast<int>(2 * params.dout_strides.row));
      stream.value += rows;
    } else {
      stream = stream_from(work, to);
    }
    return to;
  }
  __device__ __forceinline__ void load_queries(const KeyWork<C>& w, const Stream& stream, const QueryTile& tile,
                                               int i) const {
    load_rows_of<QTile>(Base::q_base(i), stream.q, p.q_strides, w.q.length - tile.first, p.d);
  }
  __device__ __forceinline__ void load_gradients(const KeyWork<C>& w, const Stream& stream, const QueryTile& tile,
                                                 int i) const {
    load_rows_of<OTile>(Base::o_base(i), stream.dout, params.dout_strides, w.q.length - tile.first, p.dv);
    Base::load_values(stream.value, w.q.length - tile.first, Base::values_at(i));
  }
  template <class Tile>
  __device__ __forceinline__ void load_rows_of(u32 to, const char* from, const Strides& strides, int rows,
                                               int columns) const {
    const int stride = static_cast<int>(2 * strides.row);
    load_tile<Tile, C.threads()>(to, rows, columns, place().thread,
                                 [&](int row) { return ptx::advance(from, row, stride); });
  }

  /// P and dS of a tile, the i-th, from its scores, to shared memory. `own_replaced`: what replace_own() says.
  __device__ __forceinline__ void share_scores(Scores (&s)[2], const QueryTile& tile, int i, bool own_replaced) const {
    Scores ds[2];
    const bool cut = work.is_cut(tile);
    if (cut || own_replaced || tests_mask<C>(tile) || B.truncates) {
      find_any(s, ds, tile, i, cut, own_replaced);
    } else {
      find_visible(s, ds, i);
    }
    share(s, probabilities_base());
    share(ds, gradients_base());
  }

  // P and dS, in place of the scores and of nothing, where all rows see all keys: P between the steps of dP's product.
  __device__ __forceinline__ void find_visible(Scores (&s)[2], Scores (&ds)[2], int i) const {
    const Place own = place();
    const u32 values = Base::values_at(i) + (own.first_row + own.lane % 4 * 2) * 4;
    const auto read = [values](float (&two)[2], int array, int n) {
      ptx::load_shared_8(two[0], two[1], values + array * 4 * C.tile_q + n * 32);
    };
    product<VTile, OTile, C.dv>(ds, Base::v_base(), Base::o_base(i), [&](int k) {
      constexpr int steps = C.dv / 16, tiles = score_rows / 8;
#pragma unroll
      for (int n = k * tiles / steps; n < (k + 1) * tiles / steps; ++n) {
        float lse[2];
        read(lse, 0, n);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = s[m].tile[0][n][e];
            score = ptx::exp2(__fmaf_rn(score, score_scale<B>(p), -lse[e % 2]));
          }
        }
      }
    });
#pragma unroll
    for (int n = 0; n < score_rows / 8; ++n) {
      float delta[2], weight[2] = {1.0F, 1.0F};
      read(delta, 1, n);
      if constexpr (B.sink) read(weight, 2, n);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& probability = s[m].tile[0][n][e];
          float& of_product = ds[m].tile[0][n][e];
          of_product = score_gradient<B>(p, probability, 0.0F, of_product, delta[e % 2], weight[e % 2], true);
          probability = value_weight<B>(probability, weight[e % 2], true);
        }
      }
    }
  }

  // The same where some are hidden, or not finite.
  __device__ __forceinline__ void find_any(Scores (&s)[2], Scores (&ds)[2], const QueryTile& tile, int i, bool cut,
                                           bool own_replaced) const {
    const Place own = place();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      TransposedScores<C, User, score_rows>{p, work, own.first_key + m * 16, own.lane}.finish(
          s[m], s[m], {tile.head, tile.first + own.first_row, tile.waived}, cut);
    }
    if (own_replaced) poison_own(s);
    product<VTile, OTile, C.dv>(ds, Base::v_base(), Base::o_base(i));
    const bool replaced = (cut || tests_mask<C>(tile) || B.truncates) && Base::replace_rows(i);
#pragma unroll
    for (int n = 0; n < score_rows / 8; ++n) {
      RowValue values[2];
      int non_finite[2];
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row = own.first_row + n * 8 + own.lane % 4 * 2 + column;
        values[column] = Base::row_value(i, row);
        non_finite[column] = replaced ? work.non_finite.of(row) : 0;
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = s[m].tile[0][n][e];
          float& of_product = ds[m].tile[0][n][e];
          const ElementGradient g = gradient_of<B>(p, score, 0.0F, of_product, values[e % 2], score_scale<B>(p), true,
                                                   non_finite[e % 2]);
          score = g.p;
          of_product = g.ds;
        }
      }
    }
  }

  struct Nothing {
    __device__ __forceinline__ void operator()(int /*k*/) const {}
  };
  // S = A·Bᵀ of the warp's keys and rows, over `columns`; `beside(k)` follows every 16 of them.
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
      const u32 at = SharedScores::chunk_pair(to + SharedScores::at(own.first_key + own.lane / 4, side), own.first_row / 16);
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

  // Adds the product of Pᵀ or dSᵀ with a tile of rows; `beside(k)` follows every 16 of them.
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

  // Where the thread adds its part of a tile's dQ. Zeros of rows that are in none of the sequence's tiles of sums go to
  // its last.
  __device__ __forceinline__ float* sums_of(const KeyWork<C>& w, const QueryTile& tile) const {
    const Place own = place();
    int row = tile.first + own.first_query();
    if (C.tile_q > kSumRows && row / kSumRows * kSumRows >= w.q.length) row -= kSumRows;
    return query_sums_of<B.d, false>(params, w.q, w.batch, w.first_head + tile.head, row / kSumRows,
                                     row % kSumRows * 2 + own.lane) +
           own.query_column() * 1024;
  }

  // The same of the tile behind.
  __device__ __forceinline__ float* sums_after(float* sums, const QueryTile& tile, const QueryTile& next) const {
    const bool has_sums = C.tile_q == kSumRows || next.first + C.tile_q <= work.q.length;
    return tile.head == next.head && has_sums ? sums + i64{next.first - tile.first} * B.d : sums_of(work, next);
  }

  // dQ = dS·K, the warp's part.
  __device__ __forceinline__ void find_queries(QueryGradients& dq) const {
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

  // Adds one of `parts` parts of the thread's numbers.
  static __device__ __forceinline__ void add_to_sums(const QueryGradients& dq, float* sums, int part, int parts) {
    constexpr int tiles = 2 * QueryGradients::pairs, all = query_rows / 16 * tiles;
#pragma unroll
    for (int at = part * all / parts; at < (part + 1) * all / parts; ++at) {
      const int m = at / tiles, n = at % tiles;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        atomicAdd(sums + m * 32 + n / 2 * query_columns * 1024 + n % 2 * 512 + e * 128, dq.rows[m].tile[0][n][e]);
      }
    }
  }

  // Zeros for what is not finite of K: dQ of a row takes every key of the block. Whether there was any; poison_own()
  // then makes NaN of what sees such a key.
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

  template <int columns>
  __device__ __forceinline__ void store(const Gradient<columns>& sums, const KeyGradient& out, int present,
                                        float factor) const {
    const Place own = place();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      store_key_gradient<B.gradient>(params, work, own.first_key + m * 16, own.lane, sums.keys[m], out, present, factor,
                                     [&](int tile) { return (tile / 2 * column_warps + own.column_warp) * 16 + tile % 2 * 8; });
    }
  }
};

/// A block for each tile of keys.
template <BwdConfig B, class User>
__device__ __forceinline__ void run_fused_pass(const BwdParams& params, char* memory) {
  ptx::griddepcontrol_wait_and_launch();
  FusedPass<B, User>::run(params, memory, static_cast<int>(blockIdx.x));
}

}  // namespace tessera::cuda
