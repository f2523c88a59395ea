// SPDX-License-Identifier: Apache-2.0
// The forward for few rows, as in decode steps, by mma.sync on every chip from SM80 on. A block computes 16 or 32
// packed rows (query, head of the group) of one (sequence, kv head, split). Each of its warps has all of these rows and
// every `warps`-th tile of keys, in its own shared memory. At the end the block merges the results of its warps; then
// the last block of the row tile merges those of splits. docs/kernels.md, section 13, draws it.
#pragma once

#include "cuda/attention/decode/warp_ring.cuh"
#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/forward/replayed_list.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/finish_scores.cuh"
#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/softmax/non_finite.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/softmax/warp_products.cuh"
#include "cuda/attention/splits/merge_rows.cuh"
#include "cuda/ptx/grid.cuh"

namespace tessera::cuda {

/// The beginning of a block's shared memory.
template <FwdConfig C>
struct DecodeMemory : SharedWork<C> {
  u64 full[C.uses_tma() ? C.warps * C.stages : 1];
  int is_last;  // whether the block is the last of its row tile's splits
};

/// `User`: the Callables of configurations that have any.
template <FwdConfig C, class User = Callables<NoCallable, NoCallable>>
struct FwdDecode {
  using Products = WarpProducts<C>;
  using Scores = typename Products::Scores;
  using Output = typename Products::Output;
  using Queries = typename Products::Queries;
  using QTile = typename Products::QTile;
  using VTile = typename Products::VTile;
  using Online = Softmax<Products::row_tiles, 15, C.rounded_sums>;
  using Memory = DecodeMemory<C>;

  static_assert(C.by_keys() && C.tiles == Tiles::range && sizeof(Memory) <= FwdConfig::kWorkBytes);
  static_assert(C.warps == 1 || C.ring_bytes() >= C.warp_part_bytes());

  const FwdParams& p;
  const DescaleParams& descales;
  const TensorMaps* maps;  // of K and V, for TMA
  Memory& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  template <class Params>
  static __device__ __forceinline__ void run(const Params& params, char* memory, const TensorMaps* maps,
                                             const DescaleParams& descales = {}) {
    Memory& kept = *reinterpret_cast<Memory*>(memory);
    const FwdDecode kernel{params, descales, maps, kept, ptx::shared_address(memory) + FwdConfig::kWorkBytes};
    BlockWork<C> first;
    if (!params.finds_early) ptx::griddepcontrol_wait_and_launch();
    const bool has_rows = first.find(params, Block::of<C>(params, static_cast<int>(blockIdx.x)));
    if (params.finds_early) ptx::griddepcontrol_wait_and_launch();
    if (threadIdx.x == 0) {
      static_cast<BlockWork<C>&>(kept) = first;
      kept.non_finite = 0;
      if constexpr (C.dropout) kept.dropout = DropoutDraws(params.dropout, first.block.batch, first.block.head);
    }
    if (has_rows) kernel.compute(first);
    if constexpr (C.merges) kernel.merge_splits(params);
  }

  __device__ __forceinline__ WarpRing<C> ring(const BlockWork<C>& of) const {
    const auto own = static_cast<u32>(warp);
    return {p,
            maps,
            of,
            q_base + C.q_bytes() + own * C.ring_bytes(),
            ptx::shared_address(work.full) + own * C.stages * 8,
            warp,
            lane};
  }

  /// `first`: the same values as `work`, for use before a barrier makes `work` readable.
  __device__ __forceinline__ void compute(const BlockWork<C>& first) const {
    Output o;
    Online softmax;
    o.clear();
    softmax.clear();
    const int count = first.tiles.count();
    if (C.merges && count == 0) {
      if (warp == 0) Epilogue<C>{p, first.block, first.sequence, q_base, lane}.store_empty_lse();
      return;
    }
    float k_descale = 1.0F;
    if constexpr (C.eight_bits) {
      k_descale = descales.k[first.block.batch * descales.k_batch + first.block.kv_head * descales.k_head];
      if constexpr (C.widens_queries) {
        k_descale *= descales.q[first.block.batch * descales.q_batch + first.block.kv_head * descales.q_head];
      }
    }
    if (count > 0) {
      load_queries(first);
      auto next = ring(first).begin(count);
      ptx::cp_async_wait<C.uses_tma() ? 0 : C.stages>();  // Q
      __syncthreads();
      const Queries q(q_base, 0, lane);
      const WarpRing<C> tiles = ring(work);
#pragma unroll 1
      for (int use = 0; tiles.tile_of(use) < count; ++use) {
        tiles.template wait<C.stages - 1>(use);
        add_tile(work.tiles.at(tiles.tile_of(use)), tiles.k_at(use), tiles.v_at(use), q, k_descale, o, softmax);
        __syncwarp();  // no lane reads the tile any more
        tiles.copy(use + C.stages, count, next);
        next = tiles.find(use + C.stages + 1, count);
      }
      ptx::cp_async_wait<0>();
    }
    if constexpr (C.warps > 1) merge_warps(o, softmax);
    if constexpr (C.warps == 1) __syncwarp();
    if (warp != 0) return;
    if constexpr (C.eight_bits) {
      const float* v = descales.v + work.block.batch * descales.v_batch + work.block.kv_head * descales.v_head;
      restore_columns(o, *v, lane);
    }
    const Epilogue<C> epilogue{p, work.block, work.sequence, q_base, lane};
    epilogue.store(o, softmax, epilogue.outputs());
    if (work.non_finite != 0) {
      add_replaced_values<C, typename User::Mask>(p, work, epilogue, 0, lane, nullptr);
    }
  }

  // All threads call this, and store chunks of 16 bytes. Rows behind the end of the sequence become zeros.
  __device__ __forceinline__ void load_queries(const BlockWork<C>& first) const {
    constexpr Element stored = C.widens_queries ? Element::e4m3 : C.type;
    const PackedRows rows(p.q, bytes_of(stored), p.q_strides, first.block, first.sequence.q.first, p.group);
    const int used = static_cast<int>(first.sequence.q.length * p.group.value) - first.block.first_row;
    constexpr int row_chunks = C.d / QTile::chunk_elements;
#pragma unroll
    for (int step = 0; step < divide_up(C.tile_q * row_chunks, C.threads()); ++step) {
      const int at = step * C.threads() + thread;
      if (C.tile_q * row_chunks % C.threads() != 0 && at >= C.tile_q * row_chunks) break;
      const int row = at / row_chunks;
      const int chunk = at % row_chunks;
      const bool valid = row < used && chunk * QTile::chunk_elements < p.d;
      const char* from = rows.at(row < used ? row : 0);
      if constexpr (C.widens_queries) {
        store_widened(q_base + QTile::at(row, chunk), from + chunk * QTile::chunk_elements, valid);
        continue;
      }
      ptx::cp_async_16_or_zeros(q_base + QTile::at(row, chunk), valid ? from + chunk * kChunkBytes : from, valid);
    }
    ptx::cp_async_commit();
  }

  /// Stores a chunk of 8 elements, widened to 16 bits.
  static __device__ __forceinline__ void store_widened(u32 to, const char* from, bool valid) {
    uint2 loaded = make_uint2(0, 0);
    if (valid) loaded = *reinterpret_cast<const uint2*>(from);
    const u32 bytes[2] = {loaded.x, loaded.y};
    u32 low[2];
    u32 high[2];
    widen<C.q_type(), Element::e4m3, false>(bytes, low, high);
    const u32 chunk[4] = {low[0], high[0], low[1], high[1]};
    ptx::store_shared_16(to, chunk);
  }

  __device__ __forceinline__ void add_tile(const KvTile& tile, u32 k_at, u32 v_at, const Queries& q, float k_descale,
                                           Output& o, Online& softmax) const {
    Scores s;
    Products::find_scores(s, q, k_at, lane);
    if constexpr (C.eight_bits) s.scale(k_descale);
    FinishScores<C, User, Memory>{p, work, 0, lane}.finish(s, tile);
    if (work.may_hide(tile)) replace_values(tile, v_at);
    softmax.apply(softmax.raise(s, Products::softmax_scale(p, work)), o);
    Products::add_values(p, work, 0, lane, tile, v_at, o, s, softmax);
  }

  // Replaces values that are not finite by zeros in a tile that may hide keys, because 0 · NaN is NaN. Behind the end
  // of a sequence, TMA loads rows of other sequences, or memory that nobody wrote; cp.async stores zeros there.
  __device__ __forceinline__ void replace_values(const KvTile& tile, u32 v_at) const {
    const auto keys = [&] { return C.uses_tma() ? work.keys_of(tile) : C.tile_kv; };
    if (cuda::replace_values<C.v_type(), VTile, 32>(v_at, lane, keys)) work.non_finite = 1;
    if constexpr (C.uses_tma()) ptx::fence_async_proxy();
    __syncwarp();
  }

  // The other warps store their results to the memory of their tiles, and the first adds these to its own, in order.
  __device__ __forceinline__ void merge_warps(Output& o, Online& softmax) const {
    if (warp != 0) store_part(part(warp), o, softmax);
    __syncthreads();
    if (warp != 0) return;
#pragma unroll 1
    for (int other = 1; other < C.warps; ++other) add_part(part(other), o, softmax);
  }
  // The address of a warp's result: 16 bytes for each lane and 8-column tile of O, then 4 for each number of a row.
  __device__ __forceinline__ u32 part(int of) const {
    return q_base + C.q_bytes() + static_cast<u32>(of) * C.ring_bytes() + static_cast<u32>(lane) * 16;
  }
  static constexpr int o_tiles = Products::row_tiles * C.dv / 8;
  __device__ __forceinline__ u32 row_number(u32 part, int m, int half, int which) const {
    return part + o_tiles * 512 - static_cast<u32>(lane) * 12 + static_cast<u32>((m * 2 + half) * 3 + which) * 128;
  }
  __device__ __forceinline__ void store_part(u32 to, const Output& o, const Online& softmax) const {
#pragma unroll
    for (int m = 0; m < Products::row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < C.dv / 8; ++n) ptx::store_shared_16(to + (m * (C.dv / 8) + n) * 512, o.tile[m][n]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared_4(row_number(to, m, half, 0), __float_as_uint(softmax.origin[m][half]));
        ptx::store_shared_4(row_number(to, m, half, 1), __float_as_uint(softmax.sum[m][half]));
        if constexpr (C.rounded_sums) {
          ptx::store_shared_4(row_number(to, m, half, 2), __float_as_uint(softmax.rounded[m][half]));
        }
      }
    }
  }
  __device__ __forceinline__ void add_part(u32 from, Output& o, Online& softmax) const {
#pragma unroll
    for (int m = 0; m < Products::row_tiles; ++m) {
      float own[2];
      float others[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float origin = ptx::load_shared_4(row_number(from, m, half, 0));
        const float highest = fmaxf(softmax.origin[m][half], origin);
        own[half] = ptx::exp2(softmax.origin[m][half] - highest);
        others[half] = ptx::exp2(origin - highest);
        softmax.origin[m][half] = highest;
        softmax.sum[m][half] =
            softmax.sum[m][half] * own[half] + ptx::load_shared_4(row_number(from, m, half, 1)) * others[half];
        if constexpr (C.rounded_sums) {
          softmax.rounded[m][half] =
              softmax.rounded[m][half] * own[half] + ptx::load_shared_4(row_number(from, m, half, 2)) * others[half];
        }
      }
#pragma unroll
      for (int n = 0; n < C.dv / 8; ++n) {
        float part[4];
        ptx::load_shared_16(part, from + (m * (C.dv / 8) + n) * 512);
#pragma unroll
        for (int i = 0; i < 4; ++i) o.tile[m][n][i] = o.tile[m][n][i] * own[i / 2] + part[i] * others[i / 2];
      }
    }
  }

  // Every block calls this, with rows or without, because the last one is found by counting all.
  __device__ __forceinline__ void merge_splits(const MergingFwdParams& params) const {
    if (warp == 0) {
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        work.is_last = count_split<C>(params, work.block);
        __threadfence();
      }
    }
    __syncthreads();
    if (work.is_last == 0) return;
    const int rows = static_cast<int>(work.sequence.q.capacity * p.group.value) - work.block.first_row;
    merge_rows<C.rounded_sums ? Element::fp32 : C.type, C.threads()>(params, work.block, work.sequence,
                                                                     min(rows, C.tile_q));
  }
};

}  // namespace tessera::cuda
