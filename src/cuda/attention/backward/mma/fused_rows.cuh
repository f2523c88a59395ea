// SPDX-License-Identifier: Apache-2.0
// The addresses of the streamed rows of the one pass by mma.sync, and of their sums of dQ. They are advanced from tile
// to tile, since computing them again takes a tenth of a tile's time.
#pragma once

#include "cuda/attention/backward/mma/fused_products.cuh"
#include "cuda/attention/backward/query_sums.cuh"
#include "cuda/ptx/global.cuh"

namespace tessera::cuda {

template <BwdConfig B, class User>
struct FusedRows : FusedProducts<B, User> {
  using Base = FusedProducts<B, User>;
  using Base::C;
  using Base::p;
  using Base::params;
  using Base::place;
  using Base::query_columns;
  using Base::query_rows;
  using Base::work;
  using typename Base::OTile;
  using typename Base::Place;
  using typename Base::QTile;
  using typename Base::QueryGradients;
  using typename Base::Work;

  // The addresses of a tile's first row of Q and dO, and the index of its first row value.
  struct Stream {
    const char* q;
    const char* dout;
    i64 value;
  };
  __device__ __forceinline__ Stream stream_from(const Work& w, const QueryTile& tile) const {
    return {Base::first_row_of(w, tile, p.q, p.q_strides),
            Base::first_row_of(w, tile, params.dout, params.dout_strides), Base::first_value_of(w, tile)};
  }
  __device__ __forceinline__ QueryTile first_tile(const Work& first, PassedWalk<B> walk) const {
    if constexpr (B.has_list()) return listed_tile(first, walk);
    return first.tile(0);
  }
  __device__ __forceinline__ QueryTile listed_tile(const Work& w, PassedWalk<B> walk) const {
    return typename Base::Listed{params, w}.next(walk, place().lane);
  }
  // Advances to the next tile, which nearly always is of the same head.
  __device__ __forceinline__ QueryTile move(Stream& stream, const QueryTile& from, PassedWalk<B> walk) const {
    QueryTile to;
    if constexpr (B.has_list()) {
      to = listed_tile(work, walk);
    } else {
      to = work.after(from);
    }
    if (to.head == from.head) {
      const int queries = Base::query_of(to.first - from.first);
      stream.q = ptx::advance(stream.q, queries, static_cast<int>(2 * p.q_strides.row));
      stream.dout = ptx::advance(stream.dout, queries, static_cast<int>(2 * params.dout_strides.row));
      stream.value += queries;
    } else {
      stream = stream_from(work, to);
    }
    return to;
  }
  __device__ __forceinline__ void load_queries(const Work& w, const Stream& stream, const QueryTile& tile,
                                               int i) const {
    Base::template load_rows_from<QTile>(Base::q_base(i), stream.q, p.q_strides, w.row_count() - tile.first, p.d);
  }
  __device__ __forceinline__ void load_dout(const Work& w, const Stream& stream, const QueryTile& tile, int i) const {
    const int rows = w.row_count() - tile.first;
    Base::template load_rows_from<OTile>(Base::o_base(i), stream.dout, params.dout_strides, rows, p.dv);
    // With has_parts(), an index that is advanced, and a thread number that is kept, would take registers from
    // accumulators.
    const i64 value = B.has_parts() ? Base::first_value_of(w, tile) : stream.value;
    Base::load_row_values(value, rows, Base::values_at(i), B.has_parts() ? place().thread : Base::thread);
  }

  // Returns where the thread adds its part of a tile's dQ. Rows of a tile may lie behind the last tile of sums of the
  // sequence. Their dQ is zero and is added to that last tile.
  __device__ __forceinline__ float* sums_of(const Work& w, const QueryTile& tile) const {
    const Place own = place();
    int row = tile.first + own.first_query();
    if (C.tile_q > kSumRows && row / kSumRows * kSumRows >= w.row_count()) row -= kSumRows;
    return query_sums_of<B.d, false, B.heads_a_tile>(params, w.q, w.batch, w.first_head + tile.head, row / kSumRows,
                                                     row % kSumRows * 2 + own.lane) +
           own.query_column() * 1024;
  }

  // The same for the next tile.
  __device__ __forceinline__ float* sums_after(float* sums, const QueryTile& tile, const QueryTile& next) const {
    // A tile of 32 rows is half a tile of sums, so the step is not constant; part of a tile of 128 rows may be moved to
    // the last tile of sums (sums_of). Both compute the address again.
    const bool has_sums = C.tile_q == kSumRows || (C.tile_q > kSumRows && next.first + C.tile_q <= work.row_count());
    return tile.head == next.head && has_sums ? sums + i64{next.first - tile.first} * B.d : sums_of(work, next);
  }

  // Adds part `part` of `parts` of the thread's dQ.
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
};

}  // namespace tessera::cuda
