// SPDX-License-Identifier: Apache-2.0
// The backward in one pass by mma.sync. A block computes dK and dV of its keys, as in key_pass.cuh, and its share of
// each tile's dQ, which it adds to sums in memory (query_sums.cuh):
//
//     Sᵀ = K·Qᵀ    Pᵀ = exp2(Sᵀ − LSE)    dPᵀ = V·dOᵀ    dSᵀ = Pᵀ ∘ (dPᵀ − δ)
//     dV += Pᵀ·dO    dK += dSᵀ·Q    dQ += dS·K
#pragma once

#include "cuda/attention/backward/lists/key_parts.cuh"
#include "cuda/attention/backward/mma/fused_rows.cuh"

namespace tessera::cuda {

template <BwdConfig B, class User>
struct FusedPass : FusedRows<B, User> {
  using Base = FusedRows<B, User>;
  using Base::C;
  using Base::gradients_base;
  using Base::p;
  using Base::params;
  using Base::place;
  using Base::probabilities_base;
  using Base::score_rows;
  using Base::work;
  using typename Base::KTile;
  using typename Base::Memory;
  using typename Base::OTile;
  using typename Base::Place;
  using typename Base::QTile;
  using typename Base::QueryGradients;
  using typename Base::Scores;
  using typename Base::Stream;
  using typename Base::VTile;
  using typename Base::Walk;
  using typename Base::Work;
  template <int columns>
  using Gradient = typename Base::template Gradient<columns>;

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned; `block`: index in the grid.
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory, int block) {
    KeyPart part{block, 0, 1, 0};
    if constexpr (B.has_parts()) {
      if (!find_part(params.key_parts, block, part)) return;
    }
    Work work;
    if (!work.find(params, part.block)) return;
    if constexpr (B.has_parts()) {
      if (part.parts > 1) {
        const typename Base::Listed listed{params, work};
        work.set_tiles(listed.of_part(part, static_cast<int>(threadIdx.x) % 32));
      }
    }
    Memory& kept = *reinterpret_cast<Memory*>(memory);
    if (threadIdx.x == 0) {
      static_cast<Work&>(kept) = work;
      if constexpr (B.has_parts()) kept.part = part;
    }
    const FusedPass pass{{params, params.forward, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes}};
    if constexpr (B.has_parts()) {
      __syncthreads();
      pass.compute(kept);  // not `work`, which the loops above would keep in registers
    } else {
      pass.compute(work);
    }
  }

  /// `first`: the same values as `work`, for use before a barrier makes `work` readable.
  __device__ __forceinline__ void compute(const Work& first) const {
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
      QueryTile tile = Base::first_tile(first, walk);
      Stream stream = Base::stream_from(first, tile);
      Base::load_queries(first, stream, tile, 0);
      Base::load_dout(first, stream, tile, 0);
      ptx::cp_async_commit();
      QueryGradients dq;
      dq.clear();
      float* sums = Base::sums_of(first, tile);  // where dq is to be added
      bool own_replaced = false;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile has arrived, and nobody reads the one before any more
        QueryTile next = tile;
        const bool has_next = i + 1 < count;
        if (has_next) next = Base::move(stream, tile, walk);
        if (B.stages > 1 && has_next) {
          Base::load_queries(work, stream, next, i + 1);
          if constexpr (!B.single_ov) Base::load_dout(work, stream, next, i + 1);
        }
        ptx::cp_async_commit();
        if (i == 0) own_replaced = Base::replace_own();
        // The atomic additions of dQ are issued between the steps of a product: the tensor cores do not wait for them.
        Scores s[2];
        Base::template product<KTile, QTile, C.d>(s, Base::k_base, Base::q_base(i), [&](int k) {
          if constexpr (B.stages == 1) Base::add_to_sums(dq, sums, k, C.d / 16);
        });
        share_scores(s, tile, i, own_replaced);
        await_scores_of_keys();
        Base::template add<OTile>(dv, probabilities_base(), Base::o_base(i));
        __syncthreads();  // dS of all keys is stored, and nobody reads dO any more
        if constexpr (B.stages > 1) {
          if constexpr (B.single_ov) {
            if (has_next) Base::load_dout(work, stream, next, i + 1);
            ptx::cp_async_commit();
          }
          Base::find_dq(dq);
          if constexpr (B.d > 64) __syncwarp();  // keeps later loads from moving up, where they would take registers
          Base::template add<QTile>(dk, gradients_base(), Base::q_base(i),
                                    [&](int k) { Base::add_to_sums(dq, sums, k, C.tile_q / 16); });
          if (has_next) sums = Base::sums_after(sums, tile, next);
        } else {
          if (has_next) Base::load_dout(work, stream, next, i + 1);
          Base::template add<QTile>(dk, gradients_base(), Base::q_base(i));
          __syncthreads();  // nobody reads Q any more
          if (has_next) Base::load_queries(work, stream, next, i + 1);
          ptx::cp_async_commit();
          Base::find_dq(dq);
          if (i > 0) sums = Base::sums_of(work, tile);
        }
        tile = next;
      }
      if constexpr (B.stages == 1) Base::add_to_sums(dq, sums, 0, 1);
      ptx::cp_async_wait<0>();
    } else {
      __syncthreads();  // makes the block's work readable, as the barriers of the loop do
    }
    if constexpr (B.has_parts()) {
      __syncthreads();  // nobody reads a tile any more
      const u32 at = Base::k_base + place().thread * 4;
      Sums{dk, dv}.visit(
          [&](float& sum, int i) { ptx::store_shared_4(at + i * C.threads() * 4, __float_as_uint(sum)); });
      if (Base::part().parts > 1 &&
          !add_parts<C.threads(), Sums::count>(params.key_parts, Base::part(), place().thread, at))
        return;
      Sums{dk, dv}.visit([&](float& sum, int i) { sum = ptx::load_shared_4(at + i * C.threads() * 4); });
    }
    store(dk, params.dk[work.segment], p.d, p.scale);
    store(dv, params.dv[work.segment], p.dv, 1.0F);
  }

  // Waits until the warps that share the keys have stored P and dS of all rows.
  static __device__ __forceinline__ void await_scores_of_keys() {
    ptx::barrier_sync(1 + place().first_key / 32, Base::column_warps * 32);
  }

  /// Computes P and dS of the i-th tile from its products and stores them to shared memory. `own_replaced`: the result
  /// of Base::replace_own().
  __device__ __forceinline__ void share_scores(Scores (&s)[2], const QueryTile& tile, int i, bool own_replaced) const {
    Scores ds[2];
    const bool cut = work.is_cut(tile);
    const bool may_hide = cut || own_replaced || tests_mask<C>(tile) || B.truncates;
    if (may_hide || B.scale_first) finish(s, tile, cut);
    if (may_hide) {
      find_any(s, ds, tile, i, cut, own_replaced);
    } else {
      find_visible(s, ds, i);
    }
    Base::share(s, probabilities_base());
    Base::share(ds, gradients_base());
  }

  // Turns products into scores; hidden ones become −∞. This pass never keeps derivatives of scores.
  __device__ __forceinline__ void finish(Scores (&s)[2], const QueryTile& tile, bool cut) const {
    const Place own = place();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const TransposedScores<C, User, score_rows, B.heads_a_tile> scores{p, work, own.first_key + m * 16, own.lane};
      const QueryTile rows{tile.head, tile.first + own.first_row, tile.waived};
      scores.template finish<false>(s[m], s[m], rows, cut, scores.load_hidden(rows));
    }
  }

  // Computes P, in place of the scores, and dS of a tile without hidden elements. The exponentials stand between the
  // steps of the product dP, so that they overlap with it.
  __device__ __forceinline__ void find_visible(Scores (&s)[2], Scores (&ds)[2], int i) const {
    const Place own = place();
    const u32 values = Base::values_at(i) + (own.first_row + own.lane % 4 * 2) * 4;
    const auto read = [values](float(&two)[2], int array, int n) {
      ptx::load_shared_8(two[0], two[1], values + array * 4 * C.tile_q + n * 32);
    };
    Base::template product<VTile, OTile, C.dv>(ds, Base::v_base(), Base::o_base(i), [&](int k) {
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

  // The same for a tile in which elements may be hidden or not finite.
  __device__ __forceinline__ void find_any(Scores (&s)[2], Scores (&ds)[2], const QueryTile& tile, int i, bool cut,
                                           bool own_replaced) const {
    const Place own = place();
    if (own_replaced) Base::poison_own(s);
    Base::template product<VTile, OTile, C.dv>(ds, Base::v_base(), Base::o_base(i));
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
          const ElementGradient g =
              gradient_of<B>(p, score, 0.0F, of_product, values[e % 2], score_scale<B>(p), true, non_finite[e % 2]);
          score = g.p;
          of_product = g.ds;
        }
      }
    }
  }

  // The accumulators of dK and dV of a thread.
  struct Sums {
    static constexpr int count = (C.d + C.dv) * C.tile_kv / C.threads();
    static_assert(!B.has_parts() || count * C.threads() * 4 <= B.smem_bytes() - FwdConfig::kWorkBytes);
    Gradient<C.d>& dk;
    Gradient<C.dv>& dv;

    template <class Visitor>
    __device__ __forceinline__ void visit(Visitor visitor) const {
      visit_gradient(dk, 0, visitor);
      visit_gradient(dv, C.d * C.tile_kv / C.threads(), visitor);
    }

   private:
    template <int columns, class Visitor>
    static __device__ __forceinline__ void visit_gradient(Gradient<columns>& sums, int first, Visitor visitor) {
      constexpr int tiles = 2 * Gradient<columns>::pairs;
#pragma unroll
      for (int i = 0; i < 2 * tiles * 4; ++i)
        visitor(sums.keys[i / (tiles * 4)].tile[0][i / 4 % tiles][i % 4], first + i);
    }
  };

  template <int columns>
  __device__ __forceinline__ void store(const Gradient<columns>& sums, const KeyGradient& out, int present,
                                        float factor) const {
    const Place own = place();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      store_key_gradient<B.gradient>(
          params, work, own.first_key + m * 16, own.lane, sums.keys[m], out, present, factor,
          [&](int tile) { return (tile / 2 * Base::column_warps + own.column_warp) * 16 + tile % 2 * 8; });
    }
  }
};

/// The grid has KeyParts::most blocks for parts, then a block for each tile of keys.
template <BwdConfig B, class User>
__device__ __forceinline__ void run_fused_pass(const BwdParams& params, char* memory) {
  const PassOverlap<B> overlap;
  FusedPass<B, User>::run(params, memory, static_cast<int>(blockIdx.x));
}

}  // namespace tessera::cuda
