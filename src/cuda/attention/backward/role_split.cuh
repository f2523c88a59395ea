// SPDX-License-Identifier: Apache-2.0
// The key pass for head dims whose dK and dV do not fit the registers of a thread together: the first warpgroup of a
// block computes dV, its second dK, each for all keys of the block. P goes from one to the other through shared memory,
// in fp32 and accumulator order, so that S and dP are computed once:
//
//     dV's:  Sᵀ = K·Qᵀ    Pᵀ = exp2(Sᵀ − LSE)    dV += Pᵀ·dO
//     dK's:  dPᵀ = V·dOᵀ  dSᵀ = Pᵀ ∘ (dPᵀ − δ)   dK += dSᵀ·Q
//
// The warpgroups wait for each other only at P, which has two buffers: exponentials of one overlap products of the
// other.
#pragma once

#include "cuda/attention/backward/wgmma.cuh"

namespace tessera::cuda {

/// Passes P of a tile between threads of the same number in the two warpgroups. Each buffer has a named barrier that
/// signals that it is full, and one that signals that it is empty.
struct ProbabilityExchange {
  static constexpr int kBuffers = 2, kThreads = 256;
  static constexpr int kFullBarrier = 1, kEmptyBarrier = kFullBarrier + kBuffers;

  template <int tiles>
  static __device__ __forceinline__ void put(const Accumulator<1, tiles>& p, u32 buffer, int i, int thread) {
    if (i >= kBuffers) ptx::barrier_sync(kEmptyBarrier + i % kBuffers, kThreads);
#pragma unroll
    for (int n = 0; n < tiles; ++n) ptx::store_shared_16(buffer + (n * 128 + thread) * 16, p.tile[0][n]);
    ptx::barrier_arrive(kFullBarrier + i % kBuffers, kThreads);
  }
  /// `last`: whether the buffer is not used again.
  template <int tiles>
  static __device__ __forceinline__ void take(Accumulator<1, tiles>& p, u32 buffer, int i, int thread, bool last) {
    ptx::barrier_sync(kFullBarrier + i % kBuffers, kThreads);
#pragma unroll
    for (int n = 0; n < tiles; ++n) ptx::load_shared_16(p.tile[0][n], buffer + (n * 128 + thread) * 16);
    if (!last) ptx::barrier_arrive(kEmptyBarrier + i % kBuffers, kThreads);
  }
};

/// dV's warpgroup.
template <class Side>
struct ValueRole : BwdWgmma<Side, false, true> {
  using Base = BwdWgmma<Side, false, true>;
  using Base::B, Base::checks, Base::p, Base::side, Base::stream;
  using typename Base::Operand, typename Base::OwnQk, typename Base::Scores, typename Base::StreamOv,
      typename Base::StreamQk;

  __device__ __forceinline__ void compute() const {
    Accumulator<1, B.dv / 8> dv;
    dv.clear();
    const int count = side.count();
    if (count > 0) {
      const float scale = score_scale<B>(p);
      this->await_own_qk();
      typename Base::ScoreOperands from = this->score_operands(0);
      Scores s;
      stream().wait(0);
      begin_products(s, from);
#pragma unroll 1
      for (int i = 0;; ++i) {
        typename Base::Kept kept;
        if constexpr (B.dropout) side.draw(kept, this->tile(i), Base::warp_row(), Base::lane_again());
        const bool hides = this->tile(i).hides;
        typename Base::Values lse;
        this->template load_row_values<Base::kLse>(lse, {}, i);
        ptx::wgmma_wait<0>();
        settle(s);
        if (hides || B.scale_first) side.finish(s, s, this->tile(i), {}, Base::warp_row(), Base::lane_again());
        Operand weights;
        if (hides) {
          checks().wait(i);
          this->template load_row_values<Base::kLse>(lse, {}, i);
          find_weights<true>(weights, s, scale, lse, i, kept);
        } else {
          find_weights<false>(weights, s, scale, lse, i, kept);
        }
        begin_outputs<B.type, StreamOv>(dv, weights, this->ov_at(from.tile_qk));
        if (i + 1 == count) break;
        from = this->score_operands(i + 1);
        stream().wait(i + 1);
        begin_products(s, from);
        ptx::wgmma_wait<1>();
        this->release(stream(), i);
      }
      ptx::wgmma_wait<0>();
      settle(dv);
    }
    side.store_ov(dv, Base::warp_row(), Base::lane_again());
  }

 private:
  __device__ __forceinline__ void begin_products(Scores& s, const typename Base::ScoreOperands& from) const {
    discard(s);
    begin_scores<B.type, OwnQk, StreamQk>(s, from.own_qk, from.tile_qk);
  }
  template <bool hides>
  __device__ __forceinline__ void find_weights(Operand& weights, Scores& s, float scale,
                                               const typename Base::Values& lse, int i,
                                               const typename Base::Kept& kept) const {
    this->template exponentiate<hides>(s, scale, lse, {}, i, 0, Base::groups_beside_dp);
    ProbabilityExchange::put(s, this->probabilities_at(i), i, Base::thread_again() % 128);
    Operand none;
    this->template find_operands<hides>(weights, none, s, s, s, {}, lse, i, kept, [](int) {});
  }
};

/// dK's warpgroup.
template <class Side>
struct KeyRole : BwdWgmma<Side, true, false> {
  using Base = BwdWgmma<Side, true, false>;
  using Base::B, Base::checks, Base::side, Base::stream;
  using typename Base::Operand, typename Base::Scores, typename Base::StreamQk;

  __device__ __forceinline__ void compute() const {
    Accumulator<1, B.d / 8> dk;
    dk.clear();
    const int count = side.count();
    if (count > 0) {
      this->await_own_ov();
      typename Base::ScoreOperands from = this->score_operands(0);
      Scores ds;
      stream().wait(0);
      this->begin_dp(ds, from);
#pragma unroll 1
      for (int i = 0;; ++i) {
        typename Base::Kept kept;
        if constexpr (B.dropout) side.draw(kept, this->tile(i), Base::warp_row(), Base::lane_again());
        const bool hides = this->tile(i).hides;
        typename Base::Values delta;
        this->template load_row_values<Base::kDelta>(delta, {}, i);
        ptx::wgmma_wait<0>();
        settle(ds);
        Scores s;
        ProbabilityExchange::take(s, this->probabilities_at(i), i, Base::thread_again() % 128,
                                  i + ProbabilityExchange::kBuffers >= count);
        Operand none, gradients;
        if (hides) {
          checks().wait(i);
          this->template load_row_values<Base::kDelta>(delta, {}, i);
          this->template find_operands<true>(none, gradients, s, ds, s, {}, delta, i, kept, [](int) {});
        } else {
          this->template find_operands<false>(none, gradients, s, ds, s, {}, delta, i, kept, [](int) {});
        }
        begin_outputs<B.type, StreamQk>(dk, gradients, from.tile_qk);
        if (i + 1 == count) break;
        from = this->score_operands(i + 1);
        stream().wait(i + 1);
        this->begin_dp(ds, from);
        ptx::wgmma_wait<1>();
        this->release(stream(), i);
      }
      ptx::wgmma_wait<0>();
      settle(dk);
    }
    side.store_qk(dk, Base::warp_row(), Base::lane_again());
  }
};

/// The consumers of a block: each warpgroup has one role.
template <class Side>
struct BwdByRoles : BwdProducer<Side> {
  using Base = BwdProducer<Side>;

  __device__ __forceinline__ void compute() const {
    if (this->warp() < 4) {
      ValueRole<Side>{{*this}}.compute();
    } else {
      KeyRole<Side>{{*this}}.compute();
    }
  }
};

/// A block for each tile of keys.
template <class Side>
__device__ __forceinline__ void run_backward_by_roles(const BwdParams& params, char* memory,
                                                      const BwdTensorMaps* maps) {
  const PassOverlap<Side::B> overlap;
  BwdProducer<Side>::template run<BwdByRoles<Side>>(params, memory, maps, static_cast<int>(blockIdx.x));
}

}  // namespace tessera::cuda
