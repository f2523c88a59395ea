// SPDX-License-Identifier: Apache-2.0
// Stores gradients from accumulators to memory.
#pragma once

#include "cuda/attention/backward/query_range.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/swizzle.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// The first columns of tiles of 8 columns that are adjacent.
struct AdjacentColumns {
  __device__ __forceinline__ int operator()(int tile) const { return tile * 8; }
};

/// Stores a warp's 16 rows of a gradient, times `factor`. to(row): the address of row `row` of the 16, or null if there
/// is none; is_used(row): whether it has a gradient, otherwise 0 is stored, whatever the sums hold; column_of(tile):
/// the first column of a tile. The whole warp calls this.
template <Element gradient, int tiles, class To, class IsUsed, class ColumnOf = AdjacentColumns>
__device__ __forceinline__ void store_gradient(const Accumulator<1, tiles>& sums, float factor, int columns,
                                               bool accumulates, int lane, To to, IsUsed is_used,
                                               ColumnOf column_of = {}) {
  constexpr int bytes = bytes_of(gradient);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    char* at = to(row);
    const bool used = at != nullptr && is_used(row);
    const auto value = [&](int n) {
      return used ? make_float2(sums.tile[0][n][half * 2] * factor, sums.tile[0][n][half * 2 + 1] * factor)
                  : make_float2(0.0F, 0.0F);
    };
    if constexpr (gradient == Element::fp32) {
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const int column = column_of(n) + lane % 4 * 2;
        if (at == nullptr || column >= columns) continue;
        const float2 own = value(n);
        float2& sum = *reinterpret_cast<float2*>(at + column * bytes);
        sum = accumulates ? make_float2(sum.x + own.x, sum.y + own.y) : own;
      }
    } else {
      // The four lanes of a row exchange words, so that each has all 8 columns of one tile of every four.
#pragma unroll
      for (int n = 0; n < tiles; n += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = n + i < tiles ? ptx::pack<gradient>(value(n + i).x, value(n + i).y) : 0;
        }
        transpose_quad(words, lane % 4);
        const int tile = n + lane % 4;
        const int column = column_of(tile);
        if (at != nullptr && tile < tiles && column < columns) ptx::store_16(at + column * bytes, words);
      }
    }
  }
}

/// Stores dQ of a warp's 16 rows; `warp_row`: the first of them within the block of `work`.
template <Element gradient, class Work, int tiles>
__device__ __forceinline__ void store_query_gradient(const BwdParams& params, const Work& work, int warp_row, int lane,
                                                     const Accumulator<1, tiles>& dq) {
  const FwdParams& p = params.forward;
  const Extent& q = work.sequence.q;
  const PackedRows out(params.dq, bytes_of(gradient), params.dq_strides, work.block, q.first, p.group);
  const int first = work.block.first_row + warp_row;
  store_gradient<gradient>(
      dq, p.scale, p.d, params.accumulates, lane,
      [&](int row) { return first + row < q.capacity ? out.writable(warp_row + row) : nullptr; },
      [&](int row) { return first + row < q.length; });
}

/// Where the gradients of a warp's 16 keys go.
template <Element gradient>
struct KeyRows {
  char* first;
  i64 row_bytes;
  int capacity, length;  // rows from the first on that have memory, and that are keys

  template <FwdConfig C, int heads_a_tile>
  __device__ __forceinline__ KeyRows(const KeyWork<C, heads_a_tile>& work, int warp_row, const KeyGradient& out) {
    const Extent& keys = work.keys.extent;
    const int key = work.first_key + warp_row;
    const i64 at =
        work.batch * out.strides.batch + (keys.first + i64{key}) * out.strides.row + work.kv_head * out.strides.head;
    first = static_cast<char*>(out.data) + bytes_of(gradient) * at;
    row_bytes = bytes_of(gradient) * out.strides.row;
    capacity = keys.capacity - key;
    length = keys.length - key;
  }
  __device__ __forceinline__ char* to(int row) const { return row < capacity ? first + row_bytes * row : nullptr; }
  __device__ __forceinline__ bool is_used(int row) const { return row < length; }
};

/// Shared memory of a warp for store_key_gradient_through(): 16 rows of 64 columns.
constexpr int kStoreScratchBytes = 16 * 64 * 2;

/// Stores dK or dV of a warp's 16 keys, of 16 bits, by way of `scratch`, shared memory of this warp. That takes half of
/// the instructions of store_key_gradient() and stores 128 bytes of a row at a time. Sums of rows behind the last key
/// are zeros, because all tiles of their block are cut (KeyWork::is_cut) and searched for values that are not finite.
/// `sums` are overwritten. SM90 and newer.
template <Element gradient, int tiles>
__device__ __forceinline__ void store_key_gradient_through(u32 scratch, Accumulator<1, tiles>& sums, float factor,
                                                           int columns, const KeyRows<gradient>& rows, int lane) {
  using Scratch = SharedTile<gradient, 16, 64>;
  static_assert(Scratch::bytes == kStoreScratchBytes && tiles % 2 == 0);
  const u32 fragment = rows_address<Scratch>(scratch, 0, lane);
  char* const own = rows.first + rows.row_bytes * (lane / 8) + lane % 8 * kChunkBytes;
  const i64 step = rows.row_bytes * 4;
#pragma unroll
  for (int first = 0; first < tiles; first += 8) {
#pragma unroll
    for (int n = first; n < first + 8 && n < tiles; n += 2) {
      auto& left = sums.tile[0][n];
      auto& right = sums.tile[0][n + 1];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        left[e] *= factor;
        right[e] *= factor;
      }
      u32 words[4];
      pack_fragment<gradient>(words, left, right);
      ptx::stmatrix_x4(Scratch::chunk_pair(fragment, (n - first) / 2), words);
    }
    __syncwarp();
    u32 words[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::load_shared_16(words[i], scratch + Scratch::at(lane / 8 + 4 * i, lane % 8));
    __syncwarp();
    const bool is_column = first * 8 + lane % 8 * 8 < columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_16_if(is_column && lane / 8 + 4 * i < rows.capacity, own + step * i + first * 8 * bytes_of(gradient),
                       words[i]);
    }
  }
}

/// Stores dK or dV of a warp's 16 keys.
template <Element gradient, FwdConfig C, int heads_a_tile, int tiles, class ColumnOf = AdjacentColumns>
__device__ __forceinline__ void store_key_gradient(const BwdParams& params, const KeyWork<C, heads_a_tile>& work,
                                                   int warp_row, int lane, const Accumulator<1, tiles>& sums,
                                                   const KeyGradient& out, int columns, float factor,
                                                   ColumnOf column_of = {}) {
  const KeyRows<gradient> rows(work, warp_row, out);
  store_gradient<gradient>(
      sums, factor, columns, params.accumulates, lane, [&](int row) { return rows.to(row); },
      [&](int row) { return rows.is_used(row); }, column_of);
}

}  // namespace tessera::cuda
