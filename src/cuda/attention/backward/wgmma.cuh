// SPDX-License-Identifier: Apache-2.0
// The backward for SM90 by wgmma: one algorithm, whose side (row_side.cuh, key_side.cuh) defines what a block owns and
// what it streams. The row pass and the key pass, whose score fragments are transposed, compute:
//
//     S = Q·Kᵀ    P = exp2(S − LSE)                 dP = dO·Vᵀ    dS = P ∘ (dP − δ)    dQ += dS·K
//     Sᵀ = K·Qᵀ   Pᵀ = exp2(Sᵀ − LSE)  dV += Pᵀ·dO  dPᵀ = V·dOᵀ   dSᵀ = Pᵀ ∘ (dPᵀ − δ)  dK += dSᵀ·Q
//
// The operands of S are called qk here (Q, K), those of dP ov (dO, V). P and dS are A operands in registers, as they
// are. If dK and dV do not fit the registers together, one warpgroup computes dV and one dK (role_split.cuh). If the
// derivative of a score must be kept too, separate blocks compute dK and dV, each with its own S (BwdConfig::apart).
// With Gradients::all the key pass also computes dQ = dS·K of a tile: dS goes through shared memory, and the TMA adds
// dQ to QuerySums.
#pragma once

#include "cuda/attention/backward/key_side.cuh"
#include "cuda/attention/backward/pass_overlap.cuh"
#include "cuda/attention/backward/query_products.cuh"
#include "cuda/attention/backward/row_side.cuh"
#include "cuda/attention/backward/score_gradient.cuh"
#include "cuda/tile/gemm_wgmma.cuh"

namespace tessera::cuda {

/// `finds_qk`: whether dQ or dK is computed; `finds_ov`: whether dV is.
template <class Side, bool finds_qk, bool finds_ov>
struct BwdWgmma : QueryProducts<Side> {
  using Base = QueryProducts<Side>;
  using Base::B, Base::checks, Base::groups, Base::memory, Base::own_ov, Base::own_qk, Base::p, Base::qk_at, Base::side,
      Base::stream, Base::values_at;
  using Base::begin_dq, Base::columns, Base::for_each, Base::kGradientBarrier, Base::lane_again, Base::poison_own,
      Base::publish_gradients, Base::publish_dq, Base::query_operands, Base::share_gradients, Base::shared_gradients,
      Base::stage_dq, Base::thread_again, Base::warp_row;
  using typename Base::Operand, typename Base::OwnOv, typename Base::OwnQk, typename Base::Scores;
  using typename Base::StreamOv, typename Base::StreamQk;
  using Kept = typename Side::Kept;
  using Tile = typename Side::Tile;
  using OwnValues = typename Side::OwnValues;
  // The number of a tile's 8-column groups whose exponentials overlap the products of dP. Those of the other groups
  // overlap the arithmetic of dS, which leaves the special function units idle.
  static constexpr int groups_beside_dp = finds_qk ? columns / 16 : columns / 8;
  // Column groups whose LSE and δ are loaded ahead of their use: as many as registers have room for.
  static constexpr int preloaded_groups = groups == 1 || columns > 96 ? 4
                                          : (B.dropout || B.scale_first) && B.adds_dq() && B.accumulators() >= 192
                                              ? 1
                                              : columns / 8;
  // If ptxas does not find out that all lanes are at the same tile, it keeps the addresses and descriptors of the tile
  // in registers of every lane. ptx::uniform() tells it where that was measured to pay
  // (docs/experiments/gpu-backward.md).
  static constexpr bool says_uniform = B.adds_dq() && (B.has_list() || columns > 64);
  // Whether a group waits for the dQ buffer and for the next tile, and loads the LSE of that tile, while dV is
  // computed. With dropout and 192 accumulators registers would spill.
  static constexpr bool looks_early = B.adds_dq() && !(B.dropout && B.accumulators() >= 192);
  // Whether dS is published after the waits for the next tile, which keeps the groups together: with ordered sums the
  // next block waits for the share of the later group. As measured, that pays for tiles of 128 rows, not for those of
  // 64.
  static constexpr bool publishes_late = B.ordered && columns > 64;
  using Values = float2[preloaded_groups];  // of one of RowValues' arrays

  /// See BwdProducer::run.
  static __device__ __forceinline__ void run(const BwdParams& params, char* memory, const BwdTensorMaps* maps,
                                             int index) {
    Base::template run<BwdWgmma>(params, memory, maps, index);
  }

  // Loops over the tiles. S of the next tile begins while the gradients of this one are being added up.
  __device__ __forceinline__ void compute() const {
    Accumulator<1, finds_qk ? B.d / 8 : 1> dqk;   // dQ or dK
    Accumulator<1, finds_ov ? B.dv / 8 : 1> dov;  // dV
    if constexpr (finds_qk) dqk.clear();
    if constexpr (finds_ov) dov.clear();
    const int count = side.count();
    if (count > 0) {
      const OwnValues own = side.own_values(warp_row(), lane_again());
      const float scale = score_scale<B>(p);
      this->await_own_qk();
      if constexpr (B.adds_dq()) this->replace_own();
      Scores s, ds;
      ScoreOperands from = score_operands(0);
      stream().wait(0);
      // These loads precede the products, because later they would queue behind the reads of shared memory by the
      // products.
      bool hides = tile(0).hides;
      if constexpr (B.adds_dq()) hides = hides || memory.own_replaced;
      Values lse, delta;
      load_row_values<kLse>(lse, own, 0);
      if (this->warp() / 4 == groups - 1) scheduler_barrier_arrive();
      scheduler_barrier_sync<Turn::scores>();
      begin_scores<B.type, OwnQk, StreamQk>(s, from.own_qk, from.tile_qk);
      this->await_own_ov();
      if constexpr (B.single_ov) this->ov_stream().wait(0);
      if constexpr (finds_qk) begin_dp(ds, from);
      if constexpr (turn == Turn::scores) scheduler_barrier_arrive();
#pragma unroll 1
      for (int i = 0;; ++i) {
        if constexpr (says_uniform) i = ptx::uniform(i);
        Kept kept;
        if constexpr (B.dropout) side.draw(kept, tile(i), warp_row(), lane_again());
        u32 share_to = 0;
        if constexpr (B.adds_dq()) share_to = shared_gradients(i);
        const typename Side::Hidden hidden = side.load_hidden(tile(i), warp_row(), lane_again());
        ptx::wgmma_wait<finds_qk ? 1 : 0>();
        settle(s);
        Scores chain;  // see score_gradient()
        if constexpr (B.keeps_products()) chain = s;
        if (hides || B.scale_first) side.finish(s, chain, tile(i), hidden, warp_row(), lane_again());
        if (hides) {
          checks().wait(i);
          load_row_values<kLse>(lse, own, i);  // NaN where the check has found a row that is not finite
          if constexpr (B.adds_dq()) poison_own(s);
          exponentiate<true>(s, scale, lse, own, i, 0, groups_beside_dp);
        } else {
          exponentiate<false>(s, scale, lse, own, i, 0, groups_beside_dp);
        }
        if constexpr (finds_qk) {
          load_row_values<kDelta>(delta, own, i);
          keep_before_wait(s, count);
          ptx::wgmma_wait<0>();
          settle(ds);
          if constexpr (B.single_ov) release(this->ov_stream(), i);
        }
        // P and dS are packed while none of the group's products runs. Otherwise ptxas makes a wgmma that takes A from
        // registers wait for all products before it.
        Operand weights, gradients;
        if (hides) {
          exponentiate<true>(s, scale, lse, own, i, groups_beside_dp, columns / 8);
          if constexpr (B.keeps_queries()) poison(s, i);
          find_operands<true>(weights, gradients, s, ds, chain, own, delta, i, kept, [](int) {});
        } else {
          find_operands<false>(weights, gradients, s, ds, chain, own, delta, i, kept, [&](int k) {
            if (groups_beside_dp + k < columns / 8)
              exponentiate<false>(s, scale, lse, own, i, groups_beside_dp + k, groups_beside_dp + k + 1);
          });
        }
        [[maybe_unused]]
        typename Base::QueryOperands operands;  // computed here: no product can begin before its descriptor is known
        if constexpr (B.adds_dq()) operands = query_operands(i);
        // Waits for the next tile and loads what its S needs. After the last tile these values are not used.
        const auto look_ahead = [&] {
          if (i + 1 < count) stream().wait(i + 1);
          hides = tile(i + 1).hides;
          load_row_values<kLse>(lse, own, i + 1);
        };
        scheduler_barrier_sync<Turn::sums>();
        if constexpr (B.adds_dq()) share_gradients(gradients, share_to);
        if constexpr (finds_ov) begin_outputs<B.type, StreamOv>(dov, weights, this->ov_at(from.tile_qk));
        discard(s);
        if constexpr (B.adds_dq()) {
          if constexpr (!publishes_late) publish_gradients(i);
          if constexpr (looks_early) {
            this->await_query_sums(i);
            look_ahead();
          }
          if constexpr (publishes_late) publish_gradients(i);
          discard(ds);
          begin_dq(ds, operands, i);
          // A wgmma with A in registers stalls its warp until the products before it have ended. So the stores of dQ
          // run beside the first half of dK, which reads little shared memory.
          constexpr int half = columns / 32;
          begin_outputs<B.type, StreamQk, 0, half>(dqk, gradients, from.tile_qk);
          stage_dq(ds, i, !looks_early);
          begin_outputs<B.type, StreamQk, half>(dqk, gradients, from.tile_qk);
        } else if constexpr (finds_qk) {
          begin_outputs<B.type, StreamQk>(dqk, gradients, from.tile_qk);
        }
        if constexpr (!looks_early) look_ahead();
        // Computed before the loop's exit: after the branch, the next tile's S would have to wait for the addresses.
        from = score_operands(i + 1);
        if (i + 1 == count) break;
        if constexpr (finds_qk && finds_ov && !B.adds_dq()) ptx::wgmma_wait<1>();  // dV has read P's registers
        scheduler_barrier_sync<Turn::scores>();
        begin_scores<B.type, OwnQk, StreamQk>(s, from.own_qk, from.tile_qk);
        if constexpr (B.adds_dq()) publish_dq(i);
        ptx::wgmma_wait<1>();  // dK or dQ has ended: dS's registers and the stage are free
        if constexpr (B.single_ov) this->ov_stream().wait(i + 1);
        if constexpr (finds_qk) begin_dp(ds, from);
        scheduler_barrier_arrive();
        release(stream(), i);
      }
      if constexpr (B.adds_dq()) publish_dq(count - 1);
      if constexpr (turn == Turn::sums) scheduler_barrier_arrive();
      ptx::wgmma_wait<0>();
      if constexpr (finds_qk) settle(dqk);
      if constexpr (finds_ov) settle(dov);
    }
    store(dqk, dov, count);
  }

 protected:
  // Stores the gradients; with splits_rows the last block of a tile of keys does so.
  template <class SumsQk, class SumsOv>
  __device__ __forceinline__ void store(SumsQk& dqk, SumsOv& dov, int count) const {
    if constexpr (B.splits_rows) {
      if (!add_parts(dqk, dov)) return;
    }
    u32 scratch = 0;
    if constexpr (B.adds_dq()) {
      // No product reads this buffer of dS any more (share_gradients()). With one tile or none, no product has read it.
      static_assert(B.warps * kStoreScratchBytes <= Base::GradientTile::bytes);
      scratch = this->gradients_at(count) + this->warp() * kStoreScratchBytes;
    }
    if constexpr (finds_qk) side.store_qk(dqk, warp_row(), lane_again(), scratch);
    if constexpr (finds_ov) side.store_ov(dov, warp_row(), lane_again(), scratch);
  }

  // The addresses of the operands of S and dP: the group's 64 rows of the block's own tiles, and the streamed tile.
  struct ScoreOperands {
    u32 own_qk, own_ov, tile_qk;
  };
  __device__ __forceinline__ ScoreOperands score_operands(int i) const {
    const int group = Base::own_threads > 128 ? this->warp() / 4 : 0;
    return {own_qk() + group * static_cast<int>(OwnQk::rows_below(64)),
            own_ov() + group * static_cast<int>(OwnOv::rows_below(64)), ptx::uniform(qk_at(i))};
  }
  // Begins dP, in the registers of dS.
  __device__ __forceinline__ void begin_dp(Scores& dp, const ScoreOperands& from) const {
    discard(dp);
    begin_scores<B.type, OwnOv, StreamOv>(dp, from.own_ov, this->ov_at(from.tile_qk));
  }

  // Writes dK and dV of the block's part of the rows to memory. The last block of a tile of keys to do so gets the sums
  // of all parts in its registers and returns true.
  __device__ __forceinline__ bool add_parts(Accumulator<1, B.d / 8>& dk, Accumulator<1, B.dv / 8>& dv) const {
    const auto visit = [&](auto use) {
#pragma unroll
      for (int n = 0; n < (B.d + B.dv) / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) use(n < B.d / 8 ? dk.tile[0][n][e] : dv.tile[0][n - B.d / 8][e], n * 4 + e);
      }
    };
    return cuda::add_parts<B.threads(), (B.d + B.dv) / 2>(side.params.row_parts, side.work.part, thread_again(),
                                                          memory.is_last_part, visit,
                                                          [] { ptx::barrier_sync(kGradientBarrier, B.threads()); });
  }

  static constexpr int kLse = 0, kDelta = 1, kWeight = 2;  // arrays of RowValues
  using typename Base::NonFinite;

  __device__ __forceinline__ const Tile& tile(int i) const { return memory.tiles[i % B.stages]; }
  template <int array>
  __device__ __forceinline__ void load_row_values(Values& values, const OwnValues& own, int i) const {
    const u32 from = values_at(i);
    const int lane = lane_again();
#pragma unroll
    for (int n = 0; n < preloaded_groups; ++n) values[n] = side.template values<array>(own, from, n, lane);
  }
  template <int array>
  __device__ __forceinline__ float2 value(const Values& values, const OwnValues& own, int i, int n, int lane) const {
    if (n < preloaded_groups) return values[n];
    if (n % 4 == 0) __syncwarp();  // keeps later loads from moving up, where they would take registers
    return side.template values<array>(own, values_at(i), n, lane);
  }
  // Turns scores into probabilities, from 8-column group `first` to `last`. With `hides`, those of hidden elements
  // become −0, which distinguishes them from very small ones; the LSE of a hidden row may be NaN.
  template <bool hides>
  __device__ __forceinline__ void exponentiate(Scores& s, float scale, const Values& lse, const OwnValues& own, int i,
                                               int first, int last) const {
    const int lane = lane_again();
#pragma unroll
    for (int n = first; n < last; ++n) {
      const float2 of_tile = value<kLse>(lse, own, i, n, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& element = s.tile[0][n][e];
        const float of_row = side.at(of_tile, e);
        const float probability = ptx::exp2(__fmaf_rn(element, scale, -of_row));
        const bool is_hidden = element == -kInfinity || (B.truncates && of_row == kInfinity);
        element = hides && is_hidden ? -0.0F : probability;
      }
    }
  }
  static __device__ __forceinline__ bool is_hidden(float probability) {
    return __float_as_uint(probability) == 0x80000000U;
  }
  // Computes the operands P and dS from P and dP. Hidden elements are selected as 0, not multiplied by 0: V of a hidden
  // key, or dO of a hidden row, may be NaN. beside(k) is called before step k.
  template <bool hides, class Beside>
  __device__ __forceinline__ void find_operands(Operand& weights, Operand& gradients, Scores& s, const Scores& ds,
                                                const Scores& chain, const OwnValues& own, const Values& delta, int i,
                                                const Kept& kept, Beside beside) const {
    const int lane = lane_again();
    const u32 from = values_at(i);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      beside(k);
      float weighted[2][4], gradient[2][4];
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float2 of_tile = value<kDelta>(delta, own, i, n, lane);
        float2 weight{};
        if constexpr (B.has_weights()) weight = side.template values<kWeight>(own, from, n, lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float probability = s.tile[0][n][e];
          const bool hidden = hides && is_hidden(probability);
          const float of_score = B.keeps_chain() ? chain.tile[0][n][e] : 0.0F;
          const float found = score_gradient<B>(p, probability, of_score, ds.tile[0][n][e], side.at(of_tile, e),
                                                side.at(weight, e), keeps(kept, n, e));
          gradient[n % 2][e] = hidden ? 0.0F : found;
          const float value = value_weight<B>(probability, side.at(weight, e), keeps(kept, n, e));
          weighted[n % 2][e] = B.has_weights() && hidden ? 0.0F : value;
        }
      }
      if constexpr (finds_ov) pack_fragment<B.type>(weights[k], weighted[0], weighted[1]);
      if constexpr (finds_qk) pack_fragment<B.type>(gradients[k], gradient[0], gradient[1]);
    }
  }
  // Sets the probabilities of keys that are not finite to NaN, unless they are hidden. Only the row pass calls this.
  __device__ __forceinline__ void poison(Scores& s, int i) const {
    const NonFinite* keys = this->non_finite(i);
    if (keys == nullptr) return;
    const int lane = lane_again();
    for_each([&](int n, int e) {
      float& element = s.tile[0][n][e];
      if (!is_hidden(element) && keys->of(n * 8 + lane % 4 * 2 + e % 2) != 0) element = kNaN;
    });
  }
  // Keeps the wait for dP after the exponentials: ptxas would move it before them, and they would not overlap the
  // products (ptx::wgmma_wait_after).
  __device__ __forceinline__ void keep_before_wait(const Scores& s, int count) const {
    u32 bits = 0;  // of the last column group; ptxas computes the others before it
#pragma unroll
    for (const float element : s.tile[0][groups_beside_dp - 1]) bits |= __float_as_uint(element);
    ptx::wgmma_wait_after(__uint_as_float(bits & static_cast<u32>(count >> 31)), ptx::shared_address(&memory.own_qk));
  }

  // The groups issue products in turn, so that exponentials of one overlap products of the other. In one pass they take
  // turns at S and dP; in two passes at dQ, or at dV and dK. (In one pass each group also waits for the dS of the
  // other, before its dQ.) Nobody waits for the last arrival of a block.
  enum class Turn { scores, sums };
  static constexpr Turn turn = B.adds_dq() ? Turn::scores : Turn::sums;
  static constexpr int kSchedulerBarrier = 1;  // the first of the named barriers, one for each group
  template <Turn at>
  __device__ __forceinline__ void scheduler_barrier_sync() const {
    if constexpr (groups == 2 && turn == at) ptx::barrier_sync(kSchedulerBarrier + thread_again() / 128, B.threads());
  }
  __device__ __forceinline__ void scheduler_barrier_arrive() const {
    if constexpr (groups == 2) {
      ptx::barrier_arrive(kSchedulerBarrier + (thread_again() / 128 + 1) % groups, B.threads());
    }
  }
  static __device__ __forceinline__ bool keeps(const Kept& kept, int n, int e) {
    if constexpr (B.dropout) return kept.keeps(n / 2, n % 2, e);
    return true;
  }
  /// Signals that the warp has read what `ring` holds of tile i.
  template <class Ring>
  __device__ __forceinline__ void release(const Ring& ring, int i) const {
    __syncwarp();
    if (lane_again() == 0) ring.release(i);
  }
};

/// Each own tile has one block, with splits_rows one for each part of the rows, or with BwdConfig::apart two: one
/// computes dK, the other dV.
template <class Side>
__device__ __forceinline__ void run_backward(const BwdParams& params, char* memory, const BwdTensorMaps* maps) {
  const PassOverlap<Side::B> overlap;
  constexpr bool keys = !Side::B.keeps_queries();
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (!Side::B.apart) {
    BwdWgmma<Side, true, keys>::run(params, memory, maps, block);
  } else if (block % 2 == 0) {
    BwdWgmma<Side, true, false>::run(params, memory, maps, block / 2);
  } else {
    BwdWgmma<Side, false, true>::run(params, memory, maps, block / 2);
  }
}

}  // namespace tessera::cuda
