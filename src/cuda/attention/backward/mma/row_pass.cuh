// SPDX-License-Identifier: Apache-2.0
// The row pass of the backward by mma.sync: dQ. A block owns tile_q rows of one head. The keys are streamed as in the
// forward, with the masks, scores, dropout and tiles of the forward:
//
//     S = Q·Kᵀ    P = exp2(S − LSE)    dP = dO·Vᵀ    dS = P ∘ (dP − δ)    dQ += dS·K
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/backward/lists/pass_tiles.cuh"
#include "cuda/attention/backward/pass_overlap.cuh"
#include "cuda/attention/backward/row_values.cuh"
#include "cuda/attention/backward/score_gradient.cuh"
#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/finish_scores.cuh"

namespace tessera::cuda {

template <BwdConfig B, class User>
struct RowPass {
  static constexpr FwdConfig C = B.as_forward();
  using QTile = SharedTile<C.type, C.tile_q, C.d>;
  using OTile = SharedTile<C.type, C.tile_q, C.dv>;
  using KTile = SharedTile<C.type, C.tile_kv, C.d>;
  using VTile = SharedTile<C.type, C.tile_kv, C.dv>;
  using Scores = Accumulator<1, C.tile_kv / 8>;
  using Gradient = Accumulator<1, C.d / 8>;
  struct Memory : SharedWork<C> {
    NonFiniteRows<B.type, B.stream_rows()> non_finite_keys;
    KvTile listed[B.has_list() ? kListedAhead : 1];  // the walk's i-th tile is at i % kListedAhead
  };
  using Listed = ListedKeyTiles<B, BlockWork<C>>;
  using Walk = BwdWalk<B>;
  static_assert(sizeof(Memory) <= FwdConfig::kWorkBytes);

  const BwdParams& params;
  const FwdParams& p;
  Memory& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16;

  __device__ __forceinline__ u32 o_base() const { return q_base + QTile::bytes; }
  __device__ __forceinline__ u32 k_base(int i) const {
    return o_base() + OTile::bytes + i % B.stages * (KTile::bytes + VTile::bytes);
  }
  __device__ __forceinline__ u32 v_base(int i) const { return k_base(i) + KTile::bytes; }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory) {
    const PassOverlap<B> overlap;
    BlockWork<C> work;
    const FwdParams& p = params.forward;
    if (!work.find(p, Block::of<C>(p, static_cast<int>(blockIdx.x)))) return;
    Memory& kept = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) {
      static_cast<BlockWork<C>&>(kept) = work;
      if constexpr (C.dropout) kept.dropout = DropoutDraws(p.dropout, work.block.batch, work.block.head);
    }
    RowPass{params, p, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes}.compute(work);
  }

  /// `first`: the same values as `work`, for use before a barrier makes `work` readable.
  __device__ __forceinline__ void compute(const BlockWork<C>& first) const {
    Gradient dq;
    dq.clear();
    const int count = count_tiles(first);
    if (count > 0) {
      load_rows(first);
      Walk walk = begin_walk<B>(Listed{params, first});
      for (int i = 0; i < B.stages - 1; ++i) fill(first, walk, i, count);
      const int row = first.block.first_row + warp_row + lane / 4;
      const RowValue rows[2] = {row_value<B>(params, first, row), row_value<B>(params, first, row + 8)};
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<B.stages - 2>();
        __syncthreads();  // tile i is here, and nobody reads tile i − 1 any more
        fill(work, walk, i + B.stages - 1, count);
        add_tile(dq, rows, i);
      }
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    store_query_gradient<B.gradient>(params, work, warp_row, lane, dq);
  }

  __device__ __forceinline__ void load_rows(const BlockWork<C>& w) const {
    const int rows = w.sequence.q.length - w.block.first_row;
    const PackedRows q(p.q, 2, p.q_strides, w.block, w.sequence.q.first, p.group);
    const PackedRows dout(params.dout, 2, params.dout_strides, w.block, w.sequence.q.first, p.group);
    load_tile<QTile, C.threads()>(q_base, rows, p.d, thread, [&](int row) { return q.at(row); });
    load_tile<OTile, C.threads()>(o_base(), rows, p.dv, thread, [&](int row) { return dout.at(row); });
  }

  __device__ __forceinline__ int count_tiles(const BlockWork<C>& w) const {
    if constexpr (B.has_list()) return Listed{params, w}.count(lane);
    return w.tiles.count();
  }
  // Advances the walk to tile i and returns it. tile_at() returns a tile again until it has been computed.
  __device__ __forceinline__ KvTile next_tile(const BlockWork<C>& w, PassedWalk<B> walk, int i) const {
    if constexpr (B.has_list()) {
      const KvTile tile = Listed{params, w}.next(walk, lane);
      if (thread == 0) work.listed[i % kListedAhead] = tile;
      return tile;
    }
    return w.tiles.at(i);
  }
  __device__ __forceinline__ KvTile tile_at(int i) const {
    if constexpr (B.has_list()) return work.listed[i % kListedAhead];
    return work.tiles.at(i);
  }

  __device__ __forceinline__ void fill(const BlockWork<C>& w, PassedWalk<B> walk, int i, int count) const {
    if (i < count) {
      const KvTile tile = next_tile(w, walk, i);
      load_kv<KTile>(w, w.keys, tile, k_base(i), p.d);
      load_kv<VTile>(w, w.values, tile, v_base(i), p.dv);
    }
    ptx::cp_async_commit();
  }
  template <class Tile>
  __device__ __forceinline__ void load_kv(const BlockWork<C>& w, const KvRows<C> (&segments)[C.segments],
                                          const KvTile& tile, u32 to, int columns) const {
    KvRows<C> rows = segments[0];
    if constexpr (C.segments == 2) rows = rows.either(tile.segment == 0, segments[0], segments[1]);
    rows.advance(tile.first);
    load_tile<Tile, C.threads()>(to, w.sequence.segment(tile.segment).extent.length - tile.first, columns, thread,
                                 [&](int row) { return rows.at(tile.first, row); });
  }

  __device__ __forceinline__ void add_tile(Gradient& dq, const RowValue (&rows)[2], int i) const {
    Scores s;
    product<QTile, KTile, C.d>(s, q_base, k_base(i));
    Scores chain;
    if constexpr (B.keeps_products()) chain = s;
    const KvTile tile = tile_at(i);
    FinishScores<C, User, Memory>{p, work, warp_row, lane}.template finish<B.differentiates()>(s, tile, &chain);
    Scores ds;
    product<OTile, VTile, C.dv>(ds, o_base(), v_base(i));
    const bool replaced = (work.may_hide(tile) || B.truncates) && replace_keys(k_base(i));
    KeptBits<C> kept;
    if constexpr (C.dropout) kept.draw(p, work, warp_row, tile, lane);
    const u32 keys = values_address<KTile>(k_base(i), lane);
#pragma unroll
    for (int k = 0; k < C.tile_kv / 16; ++k) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int n = 2 * k + side;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int by = replaced ? work.non_finite_keys.of(n * 8 + lane % 4 * 2 + e % 2) : 0;
          const float of_score = B.keeps_chain() ? chain.tile[0][n][e] : 0.0F;
          ds.tile[0][n][e] = gradient_of<B>(p, s.tile[0][n][e], of_score, ds.tile[0][n][e], rows[e / 2],
                                            score_scale<B>(p), !C.dropout || kept.keeps(k, side, e), by)
                                 .ds;
        }
      }
      u32 a[1][4];
      pack_fragment<B.type>(a[0], ds.tile[0][2 * k], ds.tile[0][2 * k + 1]);
      multiply_values<B.type, KTile>(dq, a, keys, k);
    }
  }

  // S = A·Bᵀ of the warp's rows, over `columns`.
  template <class ATile, class BTile, int columns>
  __device__ __forceinline__ void product(Scores& s, u32 rows_at, u32 keys_at) const {
    s.clear();
    const u32 rows = rows_address<ATile>(rows_at, warp_row, lane);
    const u32 keys = keys_address<BTile>(keys_at, lane);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      u32 a[1][4];
      cuda::load_rows<ATile>(a, rows, k);
      multiply_keys<B.type, BTile>(s, a, keys, k);
    }
  }

  // Replaces values of K that are not finite by zeros; returns whether there were any. V needs no replacement, because
  // dP of a hidden key is not used.
  __device__ __forceinline__ bool replace_keys(u32 k_at) const {
    auto& rows = work.non_finite_keys;
    const bool finite = rows.template are_finite<C.threads(), KTile>(k_at, thread);
    if (__syncthreads_or(finite ? 0 : 1) == 0) return false;
    rows.clear(thread);
    __syncthreads();
    rows.template replace<C.threads(), KTile>(k_at, rows.first, thread);
    __syncthreads();
    return true;
  }
};

}  // namespace tessera::cuda
