// SPDX-License-Identifier: Apache-2.0
// The key pass of the backward by mma.sync: dK and dV. A block owns tile_kv keys of one source and key head. The rows
// of all query heads that share it are streamed, head after head, so that dK and dV are sums in registers. Score
// fragments are transposed: their rows are keys, so that Pᵀ and dSᵀ are A operands as they are:
//
//     Sᵀ = K·Qᵀ    Pᵀ = exp2(Sᵀ − LSE)    dV += Pᵀ·dO    dPᵀ = V·dOᵀ    dSᵀ = Pᵀ ∘ (dPᵀ − δ)    dK += dSᵀ·Q
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/backward/lists/pass_tiles.cuh"
#include "cuda/attention/backward/pass_overlap.cuh"
#include "cuda/attention/backward/query_range.cuh"
#include "cuda/attention/backward/row_values.cuh"
#include "cuda/attention/backward/score_gradient.cuh"
#include "cuda/attention/backward/transposed_scores.cuh"
#include "cuda/attention/kv/kv_source.cuh"

namespace tessera::cuda {

/// `finds_dk`, `finds_dv`: whether the block computes dK and dV; with BwdConfig::apart it computes one of them.
template <BwdConfig B, class User, bool finds_dk, bool finds_dv>
struct KeyPass {
  static constexpr FwdConfig C = B.as_forward();
  using QTile = SharedTile<C.type, C.tile_q, C.d>;
  using OTile = SharedTile<C.type, C.tile_q, C.dv>;
  using KTile = SharedTile<C.type, C.tile_kv, C.d>;
  using VTile = SharedTile<C.type, C.tile_kv, C.dv>;
  using Scores = Accumulator<1, C.tile_q / 8>;
  using KeyGradients = Accumulator<1, finds_dk ? C.d / 8 : 1>;
  using ValueGradients = Accumulator<1, finds_dv ? C.dv / 8 : 1>;
  using Work = KeyWork<C, B.heads_a_tile>;
  struct Memory : Work {
    DropoutDraws dropout;
    NonFiniteRows<B.type, B.stream_rows()> non_finite;
    QueryTile listed[B.has_list() ? kListedAhead : 1];  // the walk's i-th tile is at i % kListedAhead
  };
  using Listed = ListedRowTiles<B, Work>;
  using Walk = BwdWalk<B>;
  static_assert(sizeof(Memory) <= FwdConfig::kWorkBytes);

  const BwdParams& params;
  const FwdParams& p;
  Memory& work;
  const u32 k_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16;

  __device__ __forceinline__ u32 v_base() const { return k_base + KTile::bytes; }
  __device__ __forceinline__ u32 exchange_base() const { return v_base() + VTile::bytes; }
  __device__ __forceinline__ u32 q_base(int i) const {
    constexpr u32 stage_bytes = QTile::bytes + (B.single_ov ? 0 : OTile::bytes);
    return exchange_base() + B.exchange_bytes() + i % B.stages * stage_bytes;
  }
  __device__ __forceinline__ u32 o_base(int i) const {
    return B.single_ov ? q_base(0) + B.stages * QTile::bytes : q_base(i) + QTile::bytes;
  }
  /// Address of the LSE, δ and weights of a tile's rows, behind all tiles.
  __device__ __forceinline__ u32 values_at(int i) const {
    return q_base(0) + B.stream_bytes() + i % B.stages * B.value_bytes();
  }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned; `index`: of the block (KeyBlock).
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory, int index) {
    Work work;
    if (!work.find(params, index)) return;
    Memory& kept = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) {
      static_cast<Work&>(kept) = work;
      if constexpr (C.dropout) kept.dropout = DropoutDraws(params.forward.dropout, work.batch, work.first_head);
    }
    KeyPass{params, params.forward, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes}.compute(work);
  }

  /// `first`: the same values as `work`, for use before a barrier makes `work` readable.
  __device__ __forceinline__ void compute(const Work& first) const {
    KeyGradients dk;
    ValueGradients dv;
    dk.clear();
    dv.clear();
    const int count = count_tiles(first);
    if (count > 0) {
      load_keys(first);
      Walk walk = begin_walk<B>(Listed{params, first});
      for (int i = 0; i < B.stages - 1; ++i) fill(first, walk, i, count);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<B.stages - 2>();
        __syncthreads();  // tile i is here, and nobody reads tile i − 1 any more
        fill(work, walk, i + B.stages - 1, count);
        add_tile(dk, dv, i);
      }
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    if constexpr (finds_dk) store(dk, params.dk[work.segment], p.d, p.scale);
    if constexpr (finds_dv) store(dv, params.dv[work.segment], p.dv, C.dropout ? p.dropout.scale : 1.0F);
  }

  __device__ __forceinline__ void load_keys(const Work& w) const {
    const KvParams& kv = p.kv[w.segment];
    const auto load = [&]<class Tile>(u32 to, const void* tensor, const Strides& strides, int columns) {
      KvRows<C> rows(kv, tensor, strides, w.keys.extent, w.batch, w.kv_head);
      rows.advance(w.first_key);
      load_tile<Tile, C.threads()>(to, w.keys.extent.length - w.first_key, columns, thread,
                                   [&](int row) { return rows.at(w.first_key, row); });
    };
    load.template operator()<KTile>(k_base, kv.k, kv.k_strides, p.d);
    if constexpr (finds_dk) load.template operator()<VTile>(v_base(), kv.v, kv.v_strides, p.dv);
  }

  __device__ __forceinline__ int count_tiles(const Work& w) const {
    if constexpr (B.has_list()) return Listed{params, w}.count(lane);
    return w.count(p);
  }
  // Advances the walk to tile i and returns it. tile_at() returns a tile again until it has been computed.
  __device__ __forceinline__ QueryTile next_tile(const Work& w, PassedWalk<B> walk, int i) const {
    if constexpr (B.has_list()) {
      const QueryTile tile = Listed{params, w}.next(walk, lane);
      if (thread == 0) work.listed[i % kListedAhead] = tile;
      return tile;
    }
    return w.tile(i);
  }
  __device__ __forceinline__ QueryTile tile_at(int i) const {
    if constexpr (B.has_list()) return work.listed[i % kListedAhead];
    return work.tile(i);
  }

  __device__ __forceinline__ void fill(const Work& w, PassedWalk<B> walk, int i, int count) const {
    if (i < count) {
      const QueryTile tile = next_tile(w, walk, i);
      const int rows = w.row_count() - tile.first;
      load_rows_from<QTile>(q_base(i), first_row_of(w, tile, p.q, p.q_strides), p.q_strides, rows, p.d);
      load_rows_from<OTile>(o_base(i), first_row_of(w, tile, params.dout, params.dout_strides), params.dout_strides,
                            rows, p.dv);
      load_row_values(first_value_of(w, tile), rows, values_at(i), thread);
    }
    ptx::cp_async_commit();
  }

  // The address of a tile's first row of Q or dO, and the index of its first row value.
  static __device__ __forceinline__ const char* first_row_of(const Work& w, const QueryTile& tile, const void* tensor,
                                                             const Strides& strides) {
    return static_cast<const char*>(tensor) +
           2 * (w.batch * strides.batch + (w.q.first + i64{query_of(tile.first)}) * strides.row +
                (w.first_head + tile.head) * strides.head);
  }
  __device__ __forceinline__ i64 first_value_of(const Work& w, const QueryTile& tile) const {
    return (w.first_head + tile.head) * params.values.rows + first_value(p, w.q, w.batch) + query_of(tile.first);
  }
  // The query of a packed row, and the number of its head among those of the tile.
  static __device__ __forceinline__ int query_of(int row) { return row / B.heads_a_tile; }
  static __device__ __forceinline__ int head_of(int row) { return row % B.heads_a_tile; }
  // `rows`: how many rows the sequence has from the first of the tile on.
  template <class Tile>
  __device__ __forceinline__ void load_rows_from(u32 to, const char* from, const Strides& strides, int rows,
                                                 int columns) const {
    const int stride = static_cast<int>(2 * strides.row);
    load_tile<Tile, C.threads()>(to, rows, columns, thread, [&](int row) {
      return ptx::advance(from + head_of(row) * (2 * strides.head), query_of(row), stride);
    });
  }

  // `first`: index of the tile's first value; `thread`: number of the thread in the block. Rows behind the end of the
  // sequence get zeros; their elements are hidden.
  __device__ __forceinline__ void load_row_values(i64 first, int rows, u32 to, int thread) const {
    constexpr int arrays = B.sink ? 3 : 2;
    const RowValues& values = params.values;
#pragma unroll
    for (int at = thread; at < round_up(arrays * C.tile_q, C.threads()); at += C.threads()) {
      const int row = at % C.tile_q;
      const int array = at / C.tile_q;
      if (array >= arrays) break;
      const float* from = array == 0 ? values.lse : array == 1 ? values.delta : values.weight;
      const bool valid = row < rows;
      const i64 behind = valid ? head_of(row) * values.rows + query_of(row) : 0;
      ptx::cp_async_4_or_zeros(to + at * 4, from + first + behind, valid);
    }
  }

  __device__ __forceinline__ RowValue row_value(int i, int row) const {
    const u32 at = values_at(i) + row * 4;
    RowValue value{ptx::load_shared_4(at), ptx::load_shared_4(at + 4 * C.tile_q), 1.0F};
    if constexpr (B.sink) value.weight = ptx::load_shared_4(at + 8 * C.tile_q);
    return value;
  }

  __device__ __forceinline__ void add_tile(KeyGradients& dk, ValueGradients& dv, int i) const {
    const QueryTile tile = tile_at(i);
    Scores s;
    product<KTile, QTile, C.d>(s, k_base, q_base(i));
    Scores chain;
    if constexpr (B.keeps_products()) chain = s;
    const bool cut = B.list_elements || work.is_cut(tile);
    const TransposedScores<C, User> scores{p, work, warp_row, lane};
    scores.template finish<B.differentiates()>(s, chain, tile, cut, {});
    Scores ds;
    if constexpr (finds_dk) product<VTile, OTile, C.dv>(ds, v_base(), o_base(i));
    const bool replaced = (cut || C.dropout || tests_mask<C>(tile) || B.truncates) && replace_rows(i);
    KeptOfKeys<C> kept;
    if constexpr (C.dropout) kept.draw(work, work.dropout, warp_row, tile, lane);
    const u32 q_rows = values_address<QTile>(q_base(i), lane);
    const u32 o_rows = values_address<OTile>(o_base(i), lane);
#pragma unroll
    for (int k = 0; k < C.tile_q / 16; ++k) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int n = 2 * k + side;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int row = n * 8 + lane % 4 * 2 + column;
          const RowValue value = row_value(i, row);
          const int by = replaced ? work.non_finite.of(row) : 0;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int e = half * 2 + column;
            const float of_score = B.keeps_chain() ? chain.tile[0][n][e] : 0.0F;
            const float dp = finds_dk ? ds.tile[0][n][e] : 0.0F;
            const ElementGradient g = gradient_of<B>(p, s.tile[0][n][e], of_score, dp, value, score_scale<B>(p),
                                                     !C.dropout || kept.keeps(k, side, e), by);
            s.tile[0][n][e] = g.p;
            ds.tile[0][n][e] = g.ds;
          }
        }
      }
      u32 a[1][4];
      if constexpr (finds_dv) {
        pack_fragment<B.type>(a[0], s.tile[0][2 * k], s.tile[0][2 * k + 1]);
        multiply_values<B.type, OTile>(dv, a, o_rows, k);
      }
      if constexpr (finds_dk) {
        pack_fragment<B.type>(a[0], ds.tile[0][2 * k], ds.tile[0][2 * k + 1]);
        multiply_values<B.type, QTile>(dk, a, q_rows, k);
      }
    }
  }

  // S = A·Bᵀ of the warp's keys, over `columns`.
  template <class ATile, class BTile, int columns>
  __device__ __forceinline__ void product(Scores& s, u32 keys_at, u32 rows_at) const {
    s.clear();
    const u32 keys = rows_address<ATile>(keys_at, warp_row, lane);
    const u32 rows = keys_address<BTile>(rows_at, lane);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      u32 a[1][4];
      load_rows<ATile>(a, keys, k);
      multiply_keys<B.type, BTile>(s, a, rows, k);
    }
  }

  __device__ __forceinline__ bool replace_rows(int i) const {
    auto& rows = work.non_finite;
    const bool finite = rows.template are_finite<C.threads(), QTile>(q_base(i), thread) &&
                        rows.template are_finite<C.threads(), OTile>(o_base(i), thread);
    if (__syncthreads_or(finite ? 0 : 1) == 0) return false;
    rows.clear(thread);
    __syncthreads();
    rows.template replace<C.threads(), QTile>(q_base(i), rows.first, thread);
    rows.template replace<C.threads(), OTile>(o_base(i), rows.second, thread);
    __syncthreads();
    return true;
  }

  template <int tiles>
  __device__ __forceinline__ void store(const Accumulator<1, tiles>& sums, const KeyGradient& out, int columns,
                                        float factor) const {
    store_key_gradient<B.gradient>(params, work, warp_row, lane, sums, out, columns, factor);
  }
};

/// The grid has a block for each tile of keys, or with BwdConfig::apart two: one computes dK, the other dV.
template <BwdConfig B, class User>
__device__ __forceinline__ void run_key_pass(const BwdParams& params, char* memory) {
  const PassOverlap<B> overlap;
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (!B.apart) {
    KeyPass<B, User, true, true>::run(params, memory, block);
  } else if (block % 2 == 0) {
    KeyPass<B, User, true, false>::run(params, memory, block / 2);
  } else {
    KeyPass<B, User, false, true>::run(params, memory, block / 2);
  }
}

}  // namespace tessera::cuda
