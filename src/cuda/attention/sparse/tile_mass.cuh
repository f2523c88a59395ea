// SPDX-License-Identifier: Apache-2.0
// The mass of each tile: Σ over a query block's rows of Σ over a key block's keys of exp(S' − LSE), or of the square of
// the inner sum. The forward has no memory to keep a row's sums of all key blocks until it knows the LSE, so the scores
// are computed once more. A thread block takes tile_q rows of one query block of one head and walks the key blocks;
// finish_mass.cuh adds up the row tiles of a query block.
//
// An LSE of 5, rounded to fp32, is off by up to 2.4e-7, and so would be every mass of its row. If masses are relative
// to this run's LSE, the exponentials are therefore those of the forward, bit for bit, divided by the forward's sum of
// them: a row with one key has a mass of exactly 1. Only a given LSE, or that of a forward with splits, is subtracted.
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/descales.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/attention/scores/score.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/softmax/warp_products.cuh"
#include "shared/mass.h"

namespace tessera::cuda {

template <FwdConfig C, class User>
struct TileMass {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using QTile = SharedTile<C.q_type(), C.tile_q, C.d>;
  using KTile = SharedTile<C.k_type(), C.tile_kv, C.d>;
  using Scores = Accumulator<row_tiles, C.tile_kv / 8>;
  using Products = typename WarpProducts<C>::Products;

  // The values of a thread's rows. The probability of a key is exp2((S' · scale − origin) · unit) / sum.
  struct Rows {
    float origin[row_tiles][2];
    float sum[row_tiles][2];
    float scale;  // of products; with scale_first, of natural scores
    float unit;
  };

  struct Work : Descales<C.descales_at_once()> {
    Block block;
    Sequence sequence;
    int query_block;
    int rows;  // rows of the query block in this tile
    float warp_sums[C.warps];
  };
  static_assert(sizeof(Work) <= C.kWorkBytes);

  const FwdParams& p;
  const MassParams& mass;
  const DescaleParams& descales;
  Work& work;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp_row = thread / 32 * C.rows_a_warp();

  static constexpr int shared_bytes() { return C.kWorkBytes + C.q_bytes() + C.k_bytes() + C.descale_bytes(); }

  /// The grid is (row tiles of all query blocks, query heads, sequences). `memory`: shared_bytes() of shared memory.
  static __device__ __forceinline__ void run(const FwdParams& p, const MassParams& mass, char* memory,
                                             const DescaleParams& descales = {}) {
    Work& work = *reinterpret_cast<Work*>(memory);
    if (threadIdx.x == 0) {
      const int tile = static_cast<int>(blockIdx.x);
      const int query_block = ptx::divide(tile, mass.row_tiles);
      const int tile_of_block = tile - query_block * static_cast<int>(mass.row_tiles.value);
      const int head = static_cast<int>(blockIdx.y);
      const int first = query_block * mass.block_q + tile_of_block * C.tile_q;
      work.block = {first, head, ptx::divide(head, p.heads_a_kv), static_cast<int>(blockIdx.z), 0};
      work.sequence = Sequence(p, work.block.batch, C.segments);
      work.query_block = query_block;
      const int left_of_block = mass.block_q - tile_of_block * C.tile_q;
      work.rows = min(min(left_of_block, work.sequence.q.length - first), C.tile_q);
      if constexpr (C.descales_at_once()) find_descales<C>(p, descales, work);
    }
    __syncthreads();
    TileMass{p, mass, descales, work, ptx::shared_address(memory) + C.kWorkBytes}.walk();
  }

  __device__ __forceinline__ void walk() const {
    const i64 tile = (static_cast<i64>(work.block.batch) * mass.heads + work.block.head) * gridDim.x + blockIdx.x;
    float* sums = mass.sums + tile * mass.key_blocks;
    if (work.rows <= 0) {
      for (int block = thread; block < mass.key_blocks; block += C.threads()) sums[block] = 0.0F;
      return;
    }
    const PackedRows rows(p.q, bytes_of(C.q_type()), p.q_strides, work.block, work.sequence.q.first, p.group);
    load_tile<QTile, C.threads()>(q_base, work.rows, p.d, thread, [&](int row) { return rows.at(row); });
    ptx::cp_async_commit();
    if constexpr (C.descales_rows()) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      int8_scores().template find_rows<QTile>(p, descales, work, q_base, warp_row, warp_row, lane);
    }
    const Rows relative = p.row_sums != nullptr ? rows_of_forward() : rows_of_lse();
    for (int block = 0; block < mass.key_blocks; ++block) {
      const float sum = block < mass.second_block ? weigh<0>(block, relative) : weigh<C.segments - 1>(block, relative);
      if (thread == 0) sums[block] = sum;
    }
  }

  // Rows without keys, and rows beyond the query block's, get an origin of +∞, with which all masses are 0. A row whose
  // sum is NaN gets NaN.
  __device__ __forceinline__ Rows rows_of_forward() const {
    const PackedRows kept(p.row_sums, sizeof(RowSum), p.row_sum_strides, work.block, work.sequence.q.first, p.group);
    Rows rows{.scale = C.scale_first ? kLog2E : WarpProducts<C>::softmax_scale(p, work), .unit = 1.0F};
    for_rows([&](int m, int half, int row) {
      const RowSum value = row < work.rows ? *reinterpret_cast<const RowSum*>(kept.at(row)) : RowSum{};
      const bool weighs = value.sum > 0.0F;
      rows.origin[m][half] = weighs ? value.origin : value.sum == 0.0F ? kInfinity : value.sum;
      rows.sum[m][half] = weighs ? value.sum : 1.0F;
    });
    return rows;
  }
  // The difference from the LSE is rounded once, before it is converted to base 2: both may be large.
  __device__ __forceinline__ Rows rows_of_lse() const {
    const PackedRows lse(p.lse, 4, p.lse_strides, work.block, work.sequence.q.first, p.group);
    Rows rows{.scale = C.scale_first ? 1.0F : p.scale, .unit = kLog2E};
    if constexpr (C.descales_at_once() && !C.scale_first) rows.scale *= product_descale(descales, work);
    for_rows([&](int m, int half, int row) {
      const float value = row < work.rows ? *reinterpret_cast<const float*>(lse.at(row)) : -kInfinity;
      rows.origin[m][half] = value == -kInfinity ? kInfinity : value;
      rows.sum[m][half] = 1.0F;
    });
    return rows;
  }
  template <class Visit>
  __device__ __forceinline__ void for_rows(Visit visit) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) visit(m, half, row_of(m, half));
    }
  }
  __device__ __forceinline__ int row_of(int m, int half) const { return warp_row + m * 16 + half * 8 + lane / 4; }

  // Returns the sum of a key block.
  template <int segment>
  __device__ __forceinline__ float weigh(int block, const Rows& relative) const {
    const Segment& keys = segment == 0 ? work.sequence.first : work.sequence.second;
    const KeysOfQueries<C> bounds(p, work.sequence, keys, work.block.first_row);
    const Interval first_row = bounds.of(work.block.first_row);
    const Interval last_row = bounds.of(work.block.first_row + work.rows - 1);
    const int begin = (block - (segment == 0 ? 0 : mass.second_block)) * mass.block_kv;
    const int seen = max(first_row.begin, begin);
    const int end = min(last_row.end, min(begin + mass.block_kv, keys.extent.length));
    if (seen >= end) return 0.0F;
    ListClass listed = ListClass::partial;
    if (mass.listed) {
      listed = ListReader(p.list, work.block.batch, work.block.head, work.block.kv_head).find(work.query_block, block);
      if (listed == ListClass::none) return 0.0F;
    }
    float weight[row_tiles][2] = {};
    const KvParams& kv = p.kv[segment];
    for (int first = begin + (seen - begin) / C.tile_kv * C.tile_kv; first < end; first += C.tile_kv) {
      __syncthreads();  // nobody reads the keys before these any more
      KvRows<C> tile(kv, kv.k, kv.k_strides, keys.extent, work.block.batch, work.block.kv_head);
      tile.advance(first);
      load_tile<KTile, C.threads()>(q_base + C.q_bytes(), keys.extent.length - first, p.d, thread,
                                    [&](int row) { return tile.at(first, row); });
      if constexpr (C.descales_keys) {
        const auto key_of = [&](int column) { return first + column; };
        int8_scores().template copy_keys<C.threads()>(p, descales, work, 0, thread, key_of);
      }
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      Scores s;
      find_scores(s);
      add_weights(weight, s, bounds, keys, first, end, listed != ListClass::full, relative);
    }
    return sum_of_rows(weight, relative);
  }

  __device__ __forceinline__ void find_scores(Scores& s) const {
    if constexpr (!C.int8_scores) {
      multiply(s);
    } else {
      Products products;
      multiply(products);
      int8_scores().convert(s, products, work, 0, warp_row, lane);
    }
  }
  __device__ __forceinline__ Int8Scores<C> int8_scores() const { return {q_base + C.q_bytes() + C.k_bytes()}; }
  __device__ __forceinline__ void multiply(Products& s) const {
    s.clear(WarpProducts<C>::first_sum());
    const u32 queries = rows_address<QTile>(q_base, warp_row, lane);
    const u32 keys = keys_address<KTile>(q_base + C.q_bytes(), lane);
#pragma unroll
    for (int k = 0; k < C.d / depth_of_product(C.q_type()); ++k) {
      u32 a[row_tiles][4];
      load_rows<QTile>(a, queries, k);
      multiply_keys<C.q_type(), KTile>(s, a, keys, k);
    }
  }

  // Adds the weights of keys [first, end). `masked`: whether the user's mask, if there is one, is evaluated.
  __device__ __forceinline__ void add_weights(float (&weight)[row_tiles][2], const Scores& s,
                                              const KeysOfQueries<C>& bounds, const Segment& keys, int first, int end,
                                              bool masked, const Rows& relative) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      const auto point_of = [&](int half, int key) {
        return ScorePoint{p.batch_offset + work.block.batch, p.head_offset + work.block.head,
                          work.sequence.q_position + work.block.first_row + row_of(m, half), keys.position + key};
      };
      HiddenBits<C> hidden;
      if constexpr (C.user_mask) {
        hidden.find(lane, [&](int half, int column) {
          return masked && !User::Mask::template visible<i64>(point_of(half, first + column), p.extras);
        });
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = work.block.first_row + row_of(m, half);
        const Interval visible = bounds.of(query);
        const bool weighs = relative.origin[m][half] != kInfinity;
        const Distances distances(work.sequence, keys, work.block.first_row, first + lane % 4 * 2);
        const float near = distances.near_of(query);
        float slope = 0.0F;
        if constexpr (C.alibi) slope = p.slopes[work.block.batch * p.slopes_batch + work.block.head * p.slopes_head];
#pragma unroll
        for (int n = 0; n < C.tile_kv / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first + n * 8 + lane % 4 * 2 + i;
            const float product = s.tile[m][n][half * 2 + i];
            float difference;
            if constexpr (C.scale_first) {
              const float score = natural_score_of<C, typename User::Score, i64>(
                  product, p, slope, distances.of(near, n * 8 + i), [&] { return point_of(half, key); });
              difference = __fmul_rn(score, relative.scale) - relative.origin[m][half];  // rounded as in the forward
            } else {
              difference = __fmaf_rn(product, relative.scale, -relative.origin[m][half]);
            }
            // A row without mass is skipped, not multiplied by 0: a key may be NaN.
            bool sees = weighs && key >= visible.begin && key < min(visible.end, end);
            if constexpr (C.user_mask) sees = sees && !hidden.at(half, n, i);
            if (sees) weight[m][half] += ptx::exp2(difference * relative.unit);
          }
        }
      }
    }
  }

  // Sums masses or their squares over the block's rows, in a fixed order.
  __device__ __forceinline__ float sum_of_rows(const float (&weight)[row_tiles][2], const Rows& relative) const {
    float sum = 0.0F;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row = quad_sum(weight[m][half]) / relative.sum[m][half];
        sum += mass.square ? row * row : row;
      }
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffU, sum, distance);
    if (lane == 0) work.warp_sums[thread / 32] = sum;
    __syncthreads();
    float total = 0.0F;
#pragma unroll
    for (int warp = 0; warp < C.warps; ++warp) total += work.warp_sums[warp];
    return total;
  }
};

}  // namespace tessera::cuda
