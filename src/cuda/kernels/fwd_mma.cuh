// SPDX-License-Identifier: Apache-2.0
// The forward for every chip from SM80 on, by mma.sync. One block computes tile_m packed rows (query, head of the
// group) of one (sequence, kv head, split); each warp keeps its own rows from the products to the output, so that only
// the tiles of K and V are shared. docs/kernels.md draws it.
#pragma once

#include "cuda/policy/epilogue.cuh"
#include "cuda/policy/kv_source.cuh"
#include "cuda/policy/mask.cuh"
#include "cuda/policy/score.cuh"
#include "cuda/policy/softmax.cuh"
#include "cuda/policy/tile_range.cuh"

namespace tessera::cuda {

template <FwdConfig C>
struct FwdMma {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using QTile = SharedTile<C.tile_m, C.d>;
  using KTile = SharedTile<C.tile_n, C.d>;
  using VTile = SharedTile<C.tile_n, C.dv>;
  using Scores = Accumulator<row_tiles, C.tile_n / 8>;
  using Output = Accumulator<row_tiles, C.dv / 8>;
  using Queries = Rows<QTile, row_tiles, C.q_in_registers>;

  // In shared memory, because the products need the registers.
  struct Work {
    Block block;
    Sequence sequence;
    TileRange<C> tiles;
  };
  static_assert(sizeof(Work) <= FwdConfig::kWorkBytes);

  const FwdParams& p;
  const Work& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * C.rows_a_warp();

  __device__ __forceinline__ u32 k_base(int stage) const {
    return q_base + C.q_bytes() + stage * (C.k_bytes() + C.v_bytes());
  }
  __device__ __forceinline__ u32 v_base(int stage) const { return k_base(stage) + C.k_bytes(); }

  /// `memory`: smem_bytes() of shared memory, 1024-byte aligned.
  static __device__ __forceinline__ void run(const FwdParams& params, char* memory) {
    Work& work = *reinterpret_cast<Work*>(memory);
    const Block block = Block::template of<C>(params);
    const Extent q = find_extent(params.cu_seqlens_q, params.seqused_q, block.batch, params.seqlen_q, params.total_q);
    if (block.first_row >= static_cast<int>(q.capacity * params.group.value)) return;
    const FwdMma kernel{params, work, ptx::shared_address(memory) + FwdConfig::kWorkBytes};
    kernel.load_queries(block, q);
    if (threadIdx.x == 0) {
      work.block = block;
      work.sequence = Sequence(params, block.batch);
      work.tiles = TileRange<C>(params, work.sequence, block);
    }
    __syncthreads();
    kernel.compute();
  }

  __device__ __forceinline__ void compute() const {
    Output o;
    Softmax<row_tiles> softmax;
    o.clear();
    softmax.clear();
    if constexpr (C.stages == 1) {
      walk_one_stage(o, softmax);
    } else {
      walk_ring(o, softmax);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the epilogue reuses the memory of the tiles
    Epilogue<C>{p, work.block, work.sequence, q_base, thread}.store(o, softmax);
  }

  // Under way while the block finds out what else it has to do.
  __device__ __forceinline__ void load_queries(const Block& block, const Extent& extent) const {
    const char* q =
        static_cast<const char*>(p.q) +
        2 * (block.batch * p.q_strides.batch + extent.first * p.q_strides.row + block.head * p.q_strides.head);
    load_tile<QTile, C.threads()>(q_base, static_cast<int>(extent.length * p.group.value) - block.first_row, p.d,
                                  thread, [&](int row) {
                                    const PackedRow at(block.first_row + row, p.group);
                                    return q + 2 * (at.query * p.q_strides.row + at.head * p.q_strides.head);
                                  });
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void load_keys(const KvTile& tile, u32 to) const {
    const KvParams& kv = p.kv[tile.segment];
    load_kv<KTile>(tile, to, kv, kv.k, kv.k_strides, p.d);
  }
  __device__ __forceinline__ void load_values(const KvTile& tile, u32 to) const {
    const KvParams& kv = p.kv[tile.segment];
    load_kv<VTile>(tile, to, kv, kv.v, kv.v_strides, p.dv);
  }
  template <class Tile>
  __device__ __forceinline__ void load_kv(const KvTile& tile, u32 to, const KvParams& kv, const void* tensor,
                                          const Strides& strides, int columns) const {
    const Extent& extent = work.sequence.segment(tile.segment).extent;
    KvRows<C.source> rows(kv, tensor, strides, extent, work.block.batch, work.block.kv_head);
    rows.advance(tile.first);
    load_tile<Tile, C.threads()>(to, extent.length - tile.first, columns, thread,
                                 [&](int row) { return rows.at(tile.first, row); });
  }

  // K and V have one buffer each: V comes while the scores are computed, the next K while softmax and P·V are.
  __device__ __forceinline__ void walk_one_stage(Output& o, Softmax<row_tiles>& softmax) const {
    const TileRange<C>& tiles = work.tiles;
    if (tiles.count() == 0) return;
    load_keys(tiles.at(0), k_base(0));
    ptx::cp_async_commit();
    const Queries q = queries<1>();
    for (int i = 0; i < tiles.count(); ++i) {
      const KvTile tile = tiles.at(i);
      ptx::cp_async_wait<0>();
      __syncthreads();
      load_values(tile, v_base(0));
      ptx::cp_async_commit();
      Scores s;
      find_scores(s, q, k_base(0));
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (i + 1 < tiles.count()) load_keys(tiles.at(i + 1), k_base(0));
      ptx::cp_async_commit();
      finish_scores(s, tile);
      softmax.raise(s, o, softmax_scale());
      add_values(o, s, softmax, v_base(0));
    }
  }

  // A ring of tiles, K and V together: one barrier a tile.
  __device__ __forceinline__ void walk_ring(Output& o, Softmax<row_tiles>& softmax) const {
    const TileRange<C>& tiles = work.tiles;
    const auto fill = [&](int i) {
      if (i < tiles.count()) {
        load_keys(tiles.at(i), k_base(i % C.stages));
        load_values(tiles.at(i), v_base(i % C.stages));
      }
      ptx::cp_async_commit();
    };
    for (int i = 0; i < C.stages - 1; ++i) fill(i);
    const Queries q = queries<C.stages - 1>();
    for (int i = 0; i < tiles.count(); ++i) {
      ptx::cp_async_wait<C.stages - 2>();
      __syncthreads();  // tile i is here, and nobody reads tile i − 1 any more
      fill(i + C.stages - 1);
      Scores s;
      find_scores(s, q, k_base(i % C.stages));
      finish_scores(s, tiles.at(i));
      softmax.raise(s, o, softmax_scale());
      add_values(o, s, softmax, v_base(i % C.stages));
    }
  }

  /// `later`: groups of copies that were begun after that of Q.
  template <int later>
  __device__ __forceinline__ Queries queries() const {
    if constexpr (C.q_in_registers) {
      ptx::cp_async_wait<later>();
      __syncthreads();
    }
    return Queries(q_base, warp_row, lane);
  }

  // S = Q·Kᵀ of the warp's rows.
  __device__ __forceinline__ void find_scores(Scores& s, const Queries& q, u32 k_at) const {
    s.clear();
    const u32 keys = keys_address<KTile>(k_at, lane);
#pragma unroll
    for (int k = 0; k < C.d / 16; ++k) {
      u32 a[row_tiles][4];
      q.read(a, k);
      multiply_keys<C.type, KTile>(s, a, keys, k);
    }
  }

  // O += P·V. The exponentials of 16 keys run beside the products of the 16 before; P's fragments are rounded from the
  // scores' in place.
  __device__ __forceinline__ void add_values(Output& o, Scores& s, Softmax<row_tiles>& softmax, u32 v_at) const {
    const u32 values = values_address<VTile>(v_at, lane);
#pragma unroll
    for (int k = 0; k < C.tile_n / 16; ++k) {
      u32 a[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        auto& left = s.tile[m][2 * k];
        auto& right = s.tile[m][2 * k + 1];
        softmax.exponentiate(m, left, softmax_scale());
        softmax.exponentiate(m, right, softmax_scale());
        a[m][0] = ptx::pack<C.type>(left[0], left[1]);
        a[m][1] = ptx::pack<C.type>(left[2], left[3]);
        a[m][2] = ptx::pack<C.type>(right[0], right[1]);
        a[m][3] = ptx::pack<C.type>(right[2], right[3]);
      }
      multiply_values<C.type, VTile>(o, a, values, k);
    }
  }

  __device__ __forceinline__ float softmax_scale() const { return C.scale_first ? 1.0F : p.scale * kLog2E; }

  // Products to scores, hidden ones to −∞.
  __device__ __forceinline__ void finish_scores(Scores& s, const KvTile& tile) const {
    if constexpr (!C.scale_first) {
      if (tile.full) return;
    }
    const int first_query = PackedRow(work.block.first_row, p.group).query;
    const RowBounds<C.affine> bounds(p, work.sequence, work.sequence.segment(tile.segment), first_query);
    const int first_key = tile.first + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PackedRow at(work.block.first_row + warp_row + m * 16 + half * 8 + lane / 4, p.group);
        const Interval visible = bounds.of(at.query);
        float slope = 0.0F;
        if constexpr (C.alibi) {
          slope = p.slopes[work.block.batch * p.slopes_batch + work.block.head + at.head];
        }
#pragma unroll
        for (int n = 0; n < C.tile_n / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = s.tile[m][n][half * 2 + i];
            const int key = first_key + n * 8 + i;
            if constexpr (C.scale_first) score = score_of<C>(score, p, slope, bounds.distance(at.query, key));
            if (key < visible.begin || key >= visible.end) score = -kInfinity;
          }
        }
      }
    }
  }
};

}  // namespace tessera::cuda
