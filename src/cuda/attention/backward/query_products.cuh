// SPDX-License-Identifier: Apache-2.0
// dQ in the key pass, with BwdConfig::adds_dq(). dQ = dS·K of a tile needs dS of all keys of the block, which goes
// through shared memory, and K, in which values that are not finite are replaced by zeros first. The TMA adds dQ to
// QuerySums. Other passes use only the types of a tile's scores from here.
#pragma once

#include "cuda/attention/backward/producer.cuh"
#include "cuda/tile/gemm_wgmma.cuh"

namespace tessera::cuda {

template <class Side>
struct QueryProducts : BwdProducer<Side> {
  using Base = BwdProducer<Side>;
  using Base::B, Base::groups, Base::lane_again, Base::memory, Base::own_qk, Base::thread_again, Base::warp_row;
  using typename Base::GradientTile, typename Base::OwnNonFinite, typename Base::OwnQk;
  static constexpr int columns = B.stream_rows();
  using Scores = Accumulator<1, columns / 8>;
  using Operand = u32[columns / 16][4];

 protected:
  static constexpr int kGradientBarrier = 3;  // of all consumers
  static constexpr int kSharedBarrier = 4;    // the first of four: see shared_barrier()

  template <class Use>
  static __device__ __forceinline__ void for_each(Use use) {
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) use(n, e);
    }
  }

  // Replaces values of K that are not finite by zeros, because dQ of a row sums over all keys of the block. All
  // consumers call this.
  __device__ __forceinline__ void replace_own() const {
    const int thread = thread_again();
    const bool finite = OwnNonFinite::template are_finite<B.threads(), OwnQk>(own_qk(), thread);
    if (!__all_sync(kAllLanes, finite)) {
      OwnNonFinite::template replace<B.threads(), OwnQk>(own_qk(), memory.own_non_finite.first, thread);
      memory.own_replaced = true;
      ptx::fence_async_proxy();
      __syncwarp();
    }
    ptx::barrier_sync(kGradientBarrier, B.threads());
    if (thread == 0) ptx::mbarrier_arrive(ptx::shared_address(&memory.own_checks));
  }
  // Sets the visible scores of keys in which replace_own() has replaced values to NaN.
  __device__ __forceinline__ void poison_own(Scores& s) const {
    const int row = warp_row() + lane_again() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (memory.own_non_finite.of(row + half * 8) == 0) continue;
      for_each([&](int n, int e) {
        float& element = s.tile[0][n][e];
        if (e / 2 == half && element != -kInfinity) element = kNaN;
      });
    }
  }

  // Stores dS of the group's keys to shared memory. None of the group's own products runs then, whose reads would slow
  // this down. The buffer is free: each group ended dQ of tile i − 2 before it published dS of tile i − 1, for which
  // this group has waited.
  __device__ __forceinline__ void share_gradients(const Operand& gradients, u32 to) const {
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) ptx::stmatrix_x4(GradientTile::chunk_pair(to, k), gradients[k]);
  }
  // Signals to the other group that this one's dS is stored.
  __device__ __forceinline__ void publish_gradients(int i) const {
    ptx::fence_async_proxy();
    ptx::barrier_arrive(shared_barrier(i, (thread_again() / 128 + 1) % groups), B.threads());
  }
  // Returns the address of a thread's first row of 16 bytes of dS, for stmatrix.
  __device__ __forceinline__ u32 shared_gradients(int i) const {
    const int thread = thread_again();
    return this->gradients_at(i) + GradientTile::at(thread / 32 * 16 + thread % 16, thread % 32 / 16);
  }
  // The addresses of the group's operands of dQ = dS·K of a tile: each group has half of the rows or of the columns. Of
  // 96 columns the second group needs 32 but computes 64; the others come from the memory behind K and are not stored.
  struct QueryOperands {
    u32 gradients, keys;
  };
  __device__ __forceinline__ QueryOperands query_operands(int i) const {
    constexpr int part = Base::query_columns;
    const int group = this->warp() / 4;
    const int rows = part == B.d ? group : 0;  // a panel of 64
    const int column = part == B.d ? 0 : group * part;
    const u32 keys = own_qk() + column / OwnQk::panel_columns * OwnQk::panel_bytes +
                     column % OwnQk::panel_columns * bytes_of(B.type);
    return {ptx::uniform(this->gradients_at(i) + rows * GradientTile::panel_bytes), ptx::uniform(keys)};
  }
  __device__ __forceinline__ void begin_dq(Scores& dq, const QueryOperands& from, int i) const {
    using Gradients = SharedTile<B.type, GradientTile::rows, 64>;
    ptx::barrier_sync(shared_barrier(i, thread_again() / 128), B.threads());
    begin_transposed<B.type, Gradients, OwnQk, Base::query_columns>(dq, from.gradients, from.keys);
  }
  // Waits until the TMA has read the group's part of dQ of the previous tile.
  __device__ __forceinline__ void await_query_sums(int i) const {
    this->query_sums().wait_empty(i * groups + this->warp() / 4);
  }
  // Stores the thread's dQ of a tile to shared memory: 16 bytes for every eight columns, two columns of two rows.
  // `waits`: this function calls await_query_sums(), because the caller has not.
  __device__ __forceinline__ void stage_dq(Scores& dq, int i, bool waits) const {
    const int group = this->warp() / 4;
    if (waits) await_query_sums(i);
    const u32 to = this->query_sums_at(group) + thread_again() % 128 * 16;
    ptx::wgmma_wait<1>();  // the products of dK are still under way
    settle(dq);
#pragma unroll
    for (int n = 0; n < Base::query_columns / 8; ++n) {
      if (n * 8 >= Base::last_query_columns && group > 0) break;
      ptx::store_shared_16(to + n * 2048, dq.tile[0][n]);
    }
  }
  // Hands dQ to the warp that adds it to the sums.
  __device__ __forceinline__ void publish_dq(int i) const {
    ptx::fence_async_proxy();
    __syncwarp();
    const int use = i * groups + this->warp() / 4;  // warp() is a shuffle, so it precedes the branch
    if (lane_again() == 0) this->query_sums().publish(use);
  }

 private:
  // The barrier at which a group waits for the other's dS. The other may arrive for the next tile before this one has
  // waited, so even and odd tiles have barriers of their own.
  static __device__ __forceinline__ int shared_barrier(int i, int group) {
    return kSharedBarrier + i % 2 * groups + group;
  }
};

}  // namespace tessera::cuda
