// SPDX-License-Identifier: Apache-2.0
// Products of a warp's 16-bit rows with an 8-bit tile in shared memory, whose elements become 16 bits in registers,
// which is exact. ldmatrix reads the tile as one of 16-bit elements with half as many columns. A register thus has four
// bytes:
//
//     K  columns 4t to 4t + 3 of a key. They stand for columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16; A's columns, of Q, are
//        read in the same order (load_rows_of_bytes), so that sums over them are those wanted.
//     V  columns 2g, 2g + 1 of keys 2t, 2t + 1. Even columns of 16 go to one tile of O, odd ones to the next;
//        restore_columns puts them in order in the end.
#pragma once

#include "cuda/tile/gemm_mma.cuh"
#include "cuda/tile/widen.cuh"

namespace tessera::cuda {

/// S += A · Kᵀ for 32 columns. K (keys, d) is in shared memory, and A's fragments of two 16-column tiles are in
/// registers.
template <Element type, class KTile, int row_tiles>
__device__ __forceinline__ void multiply_byte_keys(Accumulator<row_tiles, KTile::rows / 8>& s,
                                                   const u32 (&a)[2][row_tiles][4], u32 address, int pair) {
#pragma unroll
  for (int n = 0; n < KTile::rows / 16; ++n) {
    u32 bytes[4];
    u32 low[4];
    u32 high[4];
    ptx::ldmatrix_x4(bytes, KTile::chunk_pair(address, pair) + KTile::rows_below(n * 16));
    widen<type, KTile::type, false>(bytes, low, high);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::mma_m16n8k16<type>(s.tile[m][2 * n + i / 2], a[i % 2][m], low[i], high[i]);
      }
    }
  }
}

/// O += P · V for 16 keys. P's fragments are in registers, V (keys, dv) is in shared memory.
template <Element type, class VTile, int row_tiles>
__device__ __forceinline__ void multiply_byte_values(Accumulator<row_tiles, VTile::columns / 8>& o,
                                                     const u32 (&p)[row_tiles][4], u32 address, int key_tile) {
#pragma unroll
  for (int n = 0; n < VTile::columns / 32; ++n) {
    u32 bytes[4];
    u32 even[4];
    u32 odd[4];
    ptx::ldmatrix_x4_transposed(bytes, VTile::chunk_pair(address, n) + VTile::rows_below(key_tile * 16));
    widen<type, VTile::type, true>(bytes, even, odd);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_m16n8k16<type>(o.tile[m][4 * n + 2 * i], p[m], even[2 * i], even[2 * i + 1]);
        ptx::mma_m16n8k16<type>(o.tile[m][4 * n + 2 * i + 1], p[m], odd[2 * i], odd[2 * i + 1]);
      }
    }
  }
}

/// Puts the columns of O in the order of C tiles and multiplies them by a factor. Of each 16 columns a thread has 4t to
/// 4t + 3 before: even ones in the left tile, odd ones in the right.
template <int row_tiles, int column_tiles>
__device__ __forceinline__ void restore_columns(Accumulator<row_tiles, column_tiles>& o, float factor, int lane) {
  const bool is_odd = lane % 2 != 0;
  const int owner = lane / 4 * 4 + lane % 4 / 2;  // the lane that has columns 2t and 2t + 1
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < column_tiles; n += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const even = o.tile[m][n] + half * 2;
        float* const odd = o.tile[m][n + 1] + half * 2;
        float ordered[2][2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float evens[2] = {__shfl_sync(0xFFFFFFFFU, even[0], owner + 2 * side),
                                  __shfl_sync(0xFFFFFFFFU, even[1], owner + 2 * side)};
          const float odds[2] = {__shfl_sync(0xFFFFFFFFU, odd[0], owner + 2 * side),
                                 __shfl_sync(0xFFFFFFFFU, odd[1], owner + 2 * side)};
          ordered[side][0] = (is_odd ? evens[1] : evens[0]) * factor;
          ordered[side][1] = (is_odd ? odds[1] : odds[0]) * factor;
        }
        even[0] = ordered[0][0], even[1] = ordered[0][1];
        odd[0] = ordered[1][0], odd[1] = ordered[1][1];
      }
    }
  }
}

}  // namespace tessera::cuda
