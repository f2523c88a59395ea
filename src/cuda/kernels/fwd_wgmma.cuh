// SPDX-License-Identifier: Apache-2.0
// The forward for SM90, by wgmma. One block computes tile_m packed rows of one (sequence, kv head, split): a warpgroup
// computes 64 of them, and one thread of a further warpgroup asks the copy engine for the tiles of K and V. The
// products of a tile's scores, and those of the tile before it with V, run while the softmax of the others is computed.
#pragma once

#include "cuda/policy/block_work.cuh"
#include "cuda/policy/callables.cuh"
#include "cuda/policy/careful.cuh"
#include "cuda/policy/epilogue.cuh"
#include "cuda/policy/finish_scores.cuh"
#include "cuda/policy/softmax.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_wgmma.cuh"
#include "cuda/tile/ring.cuh"

namespace tessera::cuda {

template <FwdConfig C, class User = Callables<NoCallable, NoCallable>>
struct FwdWgmma {
  static constexpr int groups = C.warps / 4;  // that compute
  static constexpr bool takes_turns = groups >= 2;
  // What a block has at its start, 128 registers a thread (168 with two groups), shared out anew.
  static constexpr int computing_registers = groups == 1 ? 232 : groups == 2 ? 240 : 160;
  static constexpr int copying_registers = groups == 3 ? 32 : 24;
  using QTile = SharedTile<C.tile_m, C.d>;
  using KTile = SharedTile<C.tile_n, C.d>;
  using VTile = SharedTile<C.tile_n, C.dv>;
  using Scores = Accumulator<1, C.tile_n / 8>;
  using Output = Accumulator<1, C.dv / 8>;
  using Probabilities = u32[C.tile_n / 16][4];  // as an A operand

  static_assert(C.stages >= 2);  // a tile's values are looked at before those of the tile before it are let go
  static_assert(C.rows_a_warp() == 16 && sizeof(SharedWork<C>) <= FwdConfig::kWorkBytes);

  const FwdParams& p;
  const KvMaps* maps;
  SharedWork<C>& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int group = thread / 128;

  __device__ __forceinline__ u32 k_at(int i) const {
    return q_base + C.q_bytes() + i % C.stages * (C.k_bytes() + C.v_bytes());
  }
  __device__ __forceinline__ u32 v_at(int i) const { return k_at(i) + C.k_bytes(); }
  __device__ __forceinline__ Ring<C.stages> keys() const { return {ptx::shared_address(work.barriers)}; }
  __device__ __forceinline__ Ring<C.stages> values() const {
    return {ptx::shared_address(work.barriers) + Ring<C.stages>::bytes};
  }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  static __device__ __forceinline__ void run(const FwdParams& params, char* memory, const KvMaps* maps) {
    BlockWork<C> found;
    if (!found.find(params)) return;
    SharedWork<C>& kept = *reinterpret_cast<SharedWork<C>*>(memory);
    const FwdWgmma kernel{params, maps, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes};
    if (threadIdx.x == 0) {
      static_cast<BlockWork<C>&>(kept) = found;
      kept.spoiled = 0;
      kernel.keys().init(C.warps);
      kernel.values().init(C.warps);
      ptx::fence_mbarrier_init();
    }
    if (kernel.group < groups) kernel.load_queries(found);
    __syncthreads();
    if (kernel.group == groups) {
      ptx::give_registers<copying_registers>();
      if (kernel.thread == C.threads()) kernel.copy_tiles();
    } else {
      ptx::take_registers<computing_registers>();
      kernel.compute();
    }
  }

  // By the threads that compute. The copies and the zeros beside them are wgmma's to read after the barrier.
  __device__ __forceinline__ void load_queries(const BlockWork<C>& w) const {
    const PackedRows rows(p.q, 2, p.q_strides, w.block, w.sequence.q.first, p.group);
    load_tile<QTile, C.threads()>(q_base, static_cast<int>(w.sequence.q.length * p.group.value) - w.block.first_row,
                                  p.d, thread, [&](int row) { return rows.at(row); });
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void copy_tiles() const {
    const int count = work.tiles.count();
    for (int i = 0; i < count; ++i) {
      const KvTile tile = work.tiles.at(i);
      keys().acquire(i, C.k_bytes());
      copy_tile<KTile>(work, &maps->keys, p.kv[0].k_strides, tile, k_at(i), keys().full(i));
      values().acquire(i, C.v_bytes());
      copy_tile<VTile>(work, &maps->values, p.kv[0].v_strides, tile, v_at(i), values().full(i));
    }
  }

  __device__ __forceinline__ void compute() const {
    const int count = work.tiles.count();
    Output o;
    Softmax<1> softmax;
    o.clear();
    softmax.clear();
    if (count > 0) walk(count, o, softmax);
    ptx::barrier_sync(kAll, C.threads());  // the epilogue reuses the memory of the tiles
    const Epilogue<C> epilogue{p, work.block, work.sequence, q_base, thread};
    epilogue.store(o, softmax);
    if (work.spoiled != 0) {
      ReplacedValues<C, typename User::Mask>{p, work, epilogue, thread / 32 * 16, lane}.add_to_outputs();
    }
  }

  __device__ __forceinline__ void walk(int count, Output& o, Softmax<1>& softmax) const {
    Scores s;
    Probabilities weights;
    if constexpr (takes_turns) {
      if (group == groups - 1) end_turn();
    }
    keys().wait(0);
    begin_turn();
    begin_scores<C.type, QTile, KTile>(s, rows_of_group(), k_at(0));
    end_turn();
    await_scores<0>(s, 0);
    softmax.raise(s, softmax_scale());
    find_weights(s, softmax);
    pack_weights(weights, s);
    for (int i = 1; i < count; ++i) {
      keys().wait(i);
      begin_turn();
      begin_scores<C.type, QTile, KTile>(s, rows_of_group(), k_at(i));
      values().wait(i - 1);
      begin_outputs<C.type, VTile>(o, weights, v_at(i - 1));
      end_turn();
      await_scores<1>(s, i);
      const auto rescale = softmax.raise(s, softmax_scale());
      find_weights(s, softmax);
      await_outputs(o, i - 1);
      softmax.apply(rescale, o);
      pack_weights(weights, s);
    }
    values().wait(count - 1);
    begin_outputs<C.type, VTile>(o, weights, v_at(count - 1));
    await_outputs(o, count - 1);
  }

  /// `later`: products that were begun after those of the scores.
  template <int later>
  __device__ __forceinline__ void await_scores(Scores& s, int i) const {
    ptx::wgmma_wait<later>();
    settle(s);
    if (lane == 0) keys().release(i);
    const KvTile tile = work.tiles.at(i);
    FinishScores<C, User>{p, work, thread / 32 * 16, lane}.finish(s, tile);
    if (work.may_hide(tile)) replace_values(i);
  }

  __device__ __forceinline__ void await_outputs(Output& o, int i) const {
    ptx::wgmma_wait<0>();
    settle(o);
    if (lane == 0) values().release(i);
  }

  // See careful.cuh. Each group waits for all threads that look.
  __device__ __forceinline__ void replace_values(int i) const {
    values().wait(i);
    if (cuda::replace_values<C.type, VTile, C.threads()>(v_at(i), thread)) work.spoiled = 1;
    ptx::fence_async_proxy();
    ptx::barrier_sync(kAll, C.threads());
  }

  __device__ __forceinline__ void find_weights(Scores& s, Softmax<1>& softmax) const {
#pragma unroll
    for (int n = 0; n < C.tile_n / 8; ++n) softmax.exponentiate(0, s.tile[0][n], softmax_scale());
    settle(s);
    ptx::wgmma_wait_after(softmax.sum[0][0] + softmax.sum[0][1], keys().full(0));
  }

  static __device__ __forceinline__ void pack_weights(Probabilities& weights, const Scores& s) {
#pragma unroll
    for (int k = 0; k < C.tile_n / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& tile = s.tile[0][2 * k + i / 2];
        weights[k][i] = ptx::pack<C.type>(tile[i % 2 * 2], tile[i % 2 * 2 + 1]);
      }
    }
  }

  // Groups begin their products in turn, so that one's softmax runs beside the others' products.
  static constexpr int kAll = 1;   // barriers of the threads that compute
  static constexpr int kTurn = 2;  // one for each group
  __device__ __forceinline__ void begin_turn() const {
    if constexpr (takes_turns) ptx::barrier_sync(kTurn + group, 256);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (takes_turns) ptx::barrier_arrive(kTurn + (group + 1) % groups, 256);
  }

  __device__ __forceinline__ u32 rows_of_group() const { return q_base + QTile::rows_below(group * 64); }
  __device__ __forceinline__ float softmax_scale() const { return C.scale_first ? 1.0F : p.scale * kLog2E; }
};

}  // namespace tessera::cuda
