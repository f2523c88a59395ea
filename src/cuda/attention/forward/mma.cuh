// SPDX-License-Identifier: Apache-2.0
// The forward for every chip from SM80 on, by mma.sync. One block computes tile_q packed rows (query, head of the
// group) of one (sequence, kv head, split); each warp keeps its own rows from the products to the output, so that only
// the tiles of K and V are shared. docs/kernels.md draws it.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/forward/moved_list.cuh"
#include "cuda/attention/forward/replayed_list.cuh"
#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/descales.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/finish_scores.cuh"
#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/softmax/non_finite.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/softmax/warp_products.cuh"
#include "cuda/attention/tiles/tile_boxes.cuh"
#include "cuda/attention/tiles/tile_list.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/ring.cuh"

namespace tessera::cuda {

/// `User`: the Callables of configurations that have any.
template <FwdConfig C, class User = Callables<NoCallable, NoCallable>>
struct FwdMma {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using QTile = typename WarpProducts<C>::QTile;
  using KTile = typename WarpProducts<C>::KTile;
  using VTile = typename WarpProducts<C>::VTile;
  using Scores = typename WarpProducts<C>::Scores;
  using Output = typename WarpProducts<C>::Output;
  using Online = typename OnlineSoftmax<C, row_tiles>::type;
  using Queries = typename WarpProducts<C>::Queries;
  static constexpr bool has_copier = C.loader == Loader::tma_warp;
  // Registers that setmaxnreg redistributes. At launch each thread has 128 in a block of 256 threads (two such blocks
  // share a multiprocessor), or 168 in one of 384.
  static constexpr int producer_registers = 24;
  static constexpr int consumer_registers = C.warps == 4 ? 232 : 240;

  static_assert(sizeof(BlockMemory<C>) <= FwdConfig::kWorkBytes);

  const FwdParams& p;
  const DescaleParams& descales;
  const TensorMaps* maps;  // of K and V, for TMA
  BlockMemory<C>& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * C.rows_a_warp();

  __device__ __forceinline__ u32 k_base(int stage) const {
    return q_base + C.q_bytes() + stage * (C.k_bytes() + C.v_bytes());
  }
  __device__ __forceinline__ u32 v_base(int stage) const { return k_base(stage) + C.k_bytes(); }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  static __device__ __forceinline__ void run(const FwdParams& params, char* memory, const TensorMaps* maps,
                                             const DescaleParams& descales = {}) {
    ptx::griddepcontrol_wait_and_launch();
    BlockWork<C> work;
    if (!work.find(params, Block::of<C>(params, static_cast<int>(blockIdx.x / C.dv_parts)))) return;
    BlockMemory<C>& kept = *reinterpret_cast<BlockMemory<C>*>(memory);
    const FwdMma kernel{params, descales, maps, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes};
    if constexpr (has_copier) {
      if (kernel.thread >= C.threads()) return kernel.copy(work);
    }
    if (threadIdx.x == 0) {
      static_cast<BlockWork<C>&>(kept) = work;
      kept.non_finite = 0;
      if constexpr (C.skip != Skip::none) kept.unknown = 0;
      if constexpr (C.descales_at_once()) find_descales<C>(params, descales, kept);
      if constexpr (C.dropout) kept.dropout = DropoutDraws(params.dropout, work.block.batch, work.block.head);
    }
    if constexpr (C.tiles == Tiles::range) {
      kernel.compute(work);
    } else {
      __syncthreads();
      kept.find_list(params);
      kernel.compute(kept);
    }
  }

  /// `first`: the same values as `work`, for use before a barrier makes `work` readable.
  __device__ __forceinline__ void compute(const BlockWork<C>& first) const {
    if constexpr (has_copier) {
      if (first.tiles.count() > 0) load_queries(first);
      ptx::setmaxnreg_inc<consumer_registers>();
    }
    Output o;
    Online softmax;
    o.clear();
    softmax.clear();
    if constexpr (C.skip != Skip::none) softmax.begin(p, work);
    if (first.tiles.count() > 0) {
      if constexpr (!has_copier) load_queries(first);
      if constexpr (C.uses_tma()) {
        walk_rings(first.tiles.count(), o, softmax);
      } else if constexpr (C.stages == 1) {
        walk_one_stage(first, o, softmax);
      } else {
        walk_ring(first, o, softmax);
      }
      ptx::cp_async_wait<0>();
    }
    sync();  // the epilogue reuses the memory of the tiles
    if constexpr (C.skip != Skip::none) softmax.end_walk();
    const Epilogue<C> epilogue{p, work.block, work.sequence, q_base, thread_again()};
    epilogue.store(o, softmax, epilogue.outputs());
    if (work.non_finite != 0) {
      if constexpr (C.tiles == Tiles::list) sync();  // outputs have left the memory of tiles
      add_replaced_values<C, typename User::Mask>(p, work, epilogue, warp_row, lane, work.list_replay(thread / 32));
    }
    if constexpr (C.skip != Skip::none) softmax.move();
  }

  // Reads the thread's number again rather than keeping it, since registers are short.
  __device__ __forceinline__ int thread_again() const {
    if constexpr (!has_copier) return thread;
    const int again = ptx::afresh(static_cast<int>(threadIdx.x));
    __builtin_assume(again >= 0);  // so that divisions become shifts
    return again;
  }

  /// A barrier of the consumer warps, which compute.
  __device__ __forceinline__ void sync() const {
    if constexpr (has_copier) {
      ptx::barrier_sync(kComputing, C.threads());
    } else {
      __syncthreads();
    }
  }
  static constexpr int kComputing = 1, kStart = 2;  // named barriers

  __device__ __forceinline__ void load_queries(const BlockWork<C>& w) const {
    const PackedRows rows(p.q, bytes_of(C.q_type()), p.q_strides, w.block, w.sequence.q.first, p.group);
    load_tile<QTile, C.threads()>(q_base, static_cast<int>(w.sequence.q.length * p.group.value) - w.block.first_row,
                                  p.d, thread, [&](int row) { return rows.at(row); });
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void load_keys(const BlockWork<C>& w, const KvTile& tile, int i) const {
    load_kv<KTile>(w, w.keys, tile, k_base(i % C.stages), p.d);
    if constexpr (C.descales_keys) {
      const auto key_of = [&](int column) { return w.tiles.key(tile, column); };
      int8_scores().template copy_keys<C.threads()>(p, descales, w, i, thread, key_of);
    }
  }
  __device__ __forceinline__ void load_values(const BlockWork<C>& w, const KvTile& tile, u32 to) const {
    load_kv<VTile>(w, w.values, tile, to, p.dv);
  }
  template <class Tile>
  __device__ __forceinline__ void load_kv(const BlockWork<C>& w, const KvRows<C> (&segments)[C.segments],
                                          const KvTile& tile, u32 to, int columns) const {
    KvRows<C> rows = segments[0];
    if constexpr (C.segments == 2) rows = rows.either(tile.segment == 0, segments[0], segments[1]);
    if constexpr (C.gathers()) {
      const int length = w.sequence.segment(tile.segment).extent.length;
      load_rows<Tile, C.threads()>(to, columns, thread, [&](int row) {
        const int key = w.tiles.key(tile, row);
        return RowAddress{rows.at(0, key < length ? key : 0), key < length};
      });
      return;
    }
    rows.advance(tile.first);
    load_tile<Tile, C.threads()>(to, w.sequence.segment(tile.segment).extent.length - tile.first, columns, thread,
                                 [&](int row) { return rows.at(tile.first, row); });
  }

  // K and V have one buffer each. V is loaded while the scores are computed, the next K during softmax and P·V.
  __device__ __forceinline__ void walk_one_stage(const BlockWork<C>& first, Output& o, Online& softmax) const {
    load_keys(first, first.tiles.at(0), 0);
    ptx::cp_async_commit();
    const Queries q = queries<1>();
    int i = 0;
    do {  // the number of tiles stays in memory: registers are short
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (C.tiles == Tiles::list) work.collect_list(p, i, 1);
      load_values(work, work.tiles.at(i), v_base(0));
      ptx::cp_async_commit();
      Scores s;
      find_scores(s, q, 0);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < work.tiles.count()) load_keys(work, work.tiles.at(i + 1), i + 1);
      ptx::cp_async_commit();
      const KvTile tile = work.tiles.at(i);
      finish_scores(s, tile, [&] { replace_values(i, v_base(0)); });
      if constexpr (C.skip != Skip::none) softmax.enter(tile);
      softmax.apply(softmax.raise(s, softmax_scale()), o);
      add_values(o, s, softmax, tile, v_base(0));
    } while (++i < work.tiles.count());
  }

  // K and V of a tile share a stage of the ring. There is one barrier a tile, and another if the tile may hide keys.
  __device__ __forceinline__ void walk_ring(const BlockWork<C>& first, Output& o, Online& softmax) const {
    const int count = first.tiles.count();
    const auto fill = [&](const BlockWork<C>& w, int i) {
      if (i < count) {
        const KvTile tile = w.tiles.at(i);
        load_keys(w, tile, i);
        load_values(w, tile, v_base(i % C.stages));
      }
      ptx::cp_async_commit();
    };
    for (int i = 0; i < C.stages - 1; ++i) fill(first, i);
    const Queries q = queries<C.stages - 1>();
    for (int i = 0; i < count; ++i) {
      ptx::cp_async_wait<C.stages - 2>();
      __syncthreads();  // tile i is here, and nobody reads tile i − 1 any more
      if constexpr (C.tiles == Tiles::list) work.collect_list(p, i, C.stages - 1);
      fill(work, i + C.stages - 1);
      Scores s;
      find_scores(s, q, i);
      const KvTile tile = work.tiles.at(i);
      finish_scores(s, tile, [&] { replace_values(i, v_base(i % C.stages)); });
      if constexpr (C.skip != Skip::none) softmax.enter(tile);
      softmax.apply(softmax.raise(s, softmax_scale()), o);
      add_values(o, s, softmax, tile, v_base(i % C.stages));
    }
  }

  // TMA fills a ring of keys and a ring of values. A producer warp issues the copies (tma_warp), or the first thread of
  // the consumer warps (tma). That thread must wait until the slowest warp has released a buffer, but only half a tile
  // after the buffer's last use. The other threads wait only for data.
  __device__ __forceinline__ Ring<C.stages> keys() const { return {ptx::shared_address(work.barriers)}; }
  __device__ __forceinline__ Ring<C.stages> values() const { return {keys().barriers + Ring<C.stages>::bytes}; }
  __device__ __forceinline__ void init_rings() const {
    keys().init(1, C.warps);
    values().init(1, C.warps);
    ptx::fence_mbarrier_init();
  }
  /// One thread calls this. `w`: the block's work, in registers or in shared memory.
  __device__ __forceinline__ void copy_keys(const BlockWork<C>& w, int i) const {
    keys().acquire(i, C.k_bytes());
    const TileBoxes boxes = find_boxes<C>(w, p.kv[0], w.tiles.at(i), 0);
    copy_tile<C, KTile>(w, p.kv[0], maps->keys, p.kv[0].k_strides, boxes, k_base(i % C.stages), keys().full(i), 0);
  }
  __device__ __forceinline__ void copy_values(const BlockWork<C>& w, int i) const {
    values().acquire(i, C.v_bytes());
    const TileBoxes boxes = find_boxes<C>(w, p.kv[0], w.tiles.at(i), 0);
    copy_tile<C, VTile>(w, p.kv[0], maps->values, p.kv[0].v_strides, boxes, v_base(i % C.stages), values().full(i), 0);
  }

  // The producer is a whole warpgroup, because setmaxnreg applies to warpgroups; only one of its warps copies. It
  // issues the first copies before any barrier. Behind the barrier kStart the consumer warps may wait for them.
  __device__ __forceinline__ void copy(const BlockWork<C>& first) const {
    const bool copies = thread / 32 == C.warps && first.tiles.count() > 0;
    if (copies && lane == 0) {
      init_rings();
#pragma unroll 1
      for (int i = 0; i < C.stages && i < first.tiles.count(); ++i) {
        copy_keys(first, i);
        copy_values(first, i);
      }
    }
    __syncwarp();
    ptx::setmaxnreg_dec<producer_registers>();
    if (!copies) return;
    ptx::barrier_sync_of_branches(kStart, C.threads() + 32);
#pragma unroll 1
    for (int i = C.stages; lane == 0 && i < work.tiles.count(); ++i) {
      copy_keys(work, i);
      copy_values(work, i);
    }
  }

  __device__ __forceinline__ void walk_rings(int tiles, Output& o, Online& softmax) const {
    // Registers are short, so the number of tiles stays in memory if ptxas would spill otherwise.
    const auto count = [&] { return has_copier || C.stages == 1 ? work.tiles.count() : tiles; };
    const auto fill_keys = [&](int i) {
      if (!has_copier && threadIdx.x == 0 && i < count()) copy_keys(work, i);
    };
    const auto fill_values = [&](int i) {
      if (!has_copier && threadIdx.x == 0 && i < count()) copy_values(work, i);
    };
    if (!has_copier && threadIdx.x == 0) init_rings();
    for (int i = 0; i < C.stages; ++i) {
      fill_keys(i);
      fill_values(i);
    }
    ptx::cp_async_wait<0>();  // Q
    if constexpr (has_copier) {
      ptx::barrier_sync_of_branches(kStart, C.threads() + 32);
    } else {
      __syncthreads();
    }
    if constexpr (C.descales_rows()) find_rows();
    const Queries q(q_base, warp_row, lane);
    int i = 0;
    do {
      keys().wait(i);
      Scores s;
      find_scores(s, q, i);
      __syncwarp();
      if (thread_again() % 32 == 0) keys().release(i);
      if (i > 0) fill_values(i - 1 + C.stages);
      const KvTile tile = work.tiles.at(i);
      finish_scores(s, tile, [&] {
        values().wait(i);
        replace_values(i, v_base(i % C.stages));
        ptx::fence_async_proxy();
      });
      softmax.apply(softmax.raise(s, softmax_scale()), o);
      fill_keys(i + C.stages);
      values().wait(i);
      add_values(o, s, softmax, tile, v_base(i % C.stages));
      __syncwarp();
      if (thread_again() % 32 == 0) values().release(i);
    } while (++i < count());
  }

  /// `later`: the number of cp.async groups that were committed after that of Q.
  template <int later>
  __device__ __forceinline__ Queries queries() const {
    if constexpr (C.q_kept > 0 || C.descales_rows()) {
      ptx::cp_async_wait<later>();
      __syncthreads();
    }
    if constexpr (C.descales_rows()) find_rows();
    return Queries(q_base, warp_row, lane);
  }

  // S = Q·Kᵀ of the warp's rows and tile i.
  __device__ __forceinline__ void find_scores(Scores& s, const Queries& q, int i) const {
    const u32 k_at = k_base(i % C.stages);
    if constexpr (!C.int8_scores) {
      WarpProducts<C>::find_scores(s, q, k_at, lane);
    } else {
      typename WarpProducts<C>::Products products;
      WarpProducts<C>::find_scores(products, q, k_at, lane);
      const int again = thread_again();
      int8_scores().convert(s, products, work, i, again / 32 * C.rows_a_warp(), again % 32);
    }
  }
  __device__ __forceinline__ Int8Scores<C> int8_scores() const { return {q_base + C.q_bytes() + C.ring_bytes()}; }
  __device__ __forceinline__ void find_rows() const {
    int8_scores().template find_rows<QTile>(p, descales, work, q_base, warp_row, warp_row, lane);
  }

  // Turns products into scores, and calls replace() if the tile may hide keys.
  template <class Replace>
  __device__ __forceinline__ void finish_scores(Scores& s, const KvTile& tile, Replace replace) const {
    const int again = thread_again();
    FinishScores<C, User, BlockMemory<C>>{p, work, again / 32 * C.rows_a_warp(), again % 32}.finish(s, tile);
    if (work.may_hide(tile)) replace();
  }

  // Replaces values that are not finite by zeros in a tile that may hide keys, because 0 · NaN is NaN. Behind the end
  // of a sequence, TMA loads rows of other sequences, or memory that nobody wrote. The tile must have arrived for all
  // threads; the function ends with a barrier.
  __device__ __forceinline__ void replace_values(int i, u32 v_at) const {
    // Behind the end of a sequence, cp.async stores zeros.
    const auto keys = [&] { return C.uses_tma() ? work.keys_of(work.tiles.at(i)) : C.tile_kv; };
    if (cuda::replace_values<C.type, VTile, C.threads()>(v_at, thread_again(), keys)) work.non_finite = 1;
    sync();
  }

  // O += P·V.
  __device__ __forceinline__ void add_values(Output& o, Scores& s, Online& softmax, const KvTile& tile,
                                             u32 v_at) const {
    WarpProducts<C>::add_values(p, work, warp_row, lane, tile, v_at, o, s, softmax);
  }

  __device__ __forceinline__ float softmax_scale() const { return WarpProducts<C>::softmax_scale(p, work); }
};

/// Returns the parameters of one of the blocks that share the columns of V and O, for its own columns. Only the first
/// of them writes the LSE and the row sums.
template <FwdConfig C, class Params>
__device__ __forceinline__ Params column_part(const Params& whole) {
  const int first = static_cast<int>(blockIdx.x % C.dv_parts) * C.dv;
  Params p = whole;
  p.dv = min(p.dv - first, C.dv);
  p.o = static_cast<char*>(p.o) + first * bytes_of(C.output);
  if constexpr (C.residual) p.o_residual += first;
  if (first != 0) {
    p.lse = nullptr;
    p.row_sums = nullptr;
  }
#pragma unroll
  for (int i = 0; i < C.segments; ++i) p.kv[i].v = static_cast<const char*>(p.kv[i].v) + first * bytes_of(C.type);
  return p;
}

}  // namespace tessera::cuda
