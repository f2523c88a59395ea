// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup's 64 rows with a tile in shared memory, by wgmma. They are asynchronous: until
// ptx::wgmma_wait their operands must not be written, and their accumulators must not be accessed.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "cuda/tile/swizzle.cuh"

namespace tessera::cuda {

/// Descriptors of a SharedTile.
template <class Tile>
struct Descriptor {
  static constexpr u32 row_bytes = Tile::row_bytes;
  static constexpr u32 low = static_cast<u32>(Tile::panel_bytes / 16) << 16;
  static constexpr u32 high = (row_bytes == 128 ? 1U : 2U) << 30 | Tile::eight_rows / 16;

  // Only the low half depends on the address, and offsets are constants: one register serves all steps.
  static __device__ __forceinline__ u64 at(u32 tile, int offset) {
    return static_cast<u64>(high) << 32 | ((low | tile >> 4) + static_cast<u32>(offset / 16));
  }
  /// The columns of the k_tile-th step of a K-major operand, all rows.
  static __device__ __forceinline__ u64 columns(u32 tile, int k_tile) {
    constexpr int in_panel = Tile::row_bytes / kProductBytes;
    return at(tile, k_tile / in_panel * Tile::panel_bytes + k_tile % in_panel * kProductBytes);
  }
  /// The rows of the k_tile-th step of an MN-major operand, all columns.
  static __device__ __forceinline__ u64 rows(u32 tile, int k_tile) {
    return at(tile, Tile::rows_below(depth_of_product(Tile::type) * k_tile));
  }
};

/// Must follow a wait: keeps the compiler from moving uses of the result before it.
template <int column_tiles, class Number>
__device__ __forceinline__ void settle(Accumulator<1, column_tiles, Number>& c) {
#pragma unroll
  for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_settle(c.tile[0][n][i]);
  }
}

/// For a product that overwrites the accumulators: their registers are free until it begins.
template <int column_tiles>
__device__ __forceinline__ void discard(Accumulator<1, column_tiles>& c) {
#pragma unroll
  for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_discard(c.tile[0][n][i]);
  }
}

/// Begins S = Q·Kᵀ. `rows`: the address of the first of the warpgroup's 64 rows of Q.
template <Element type, class QTile, class KTile, class Number>
__device__ __forceinline__ void begin_scores(Accumulator<1, KTile::rows / 8, Number>& s, u32 rows, u32 keys) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < KTile::columns / depth_of_product(type); ++k) {
    ptx::Wgmma<KTile::rows, type>::from_shared(&s.tile[0][0][0], Descriptor<QTile>::columns(rows, k),
                                               Descriptor<KTile>::columns(keys, k), k > 0);
  }
  ptx::wgmma_commit();
}

/// Begins O = P·V with both operands in shared memory. `rows`: the address of the first of the warpgroup's 64 rows of
/// P.
template <Element type, class PTile, class VTile>
__device__ __forceinline__ void begin_shared(Accumulator<1, VTile::columns / 8>& o, u32 rows, u32 values) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < VTile::rows / depth_of_product(type); ++k) {
    ptx::Wgmma<VTile::columns, type>::template from_shared<true>(&o.tile[0][0][0], Descriptor<PTile>::columns(rows, k),
                                                                 Descriptor<VTile>::rows(values, k), k > 0);
  }
  ptx::wgmma_commit();
}

/// Begins O = Aᵀ·B with both operands in shared memory: 64 columns of A, and `columns` columns of B from address `b`
/// on. The columns of B lie in one panel, or begin at the start of one. O is the first columns of `o`.
template <Element type, class ATile, class BTile, int columns, int column_tiles>
__device__ __forceinline__ void begin_transposed(Accumulator<1, column_tiles>& o, u32 a, u32 b) {
  static_assert(ATile::columns == 64 && ATile::rows == BTile::rows && columns <= column_tiles * 8);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < ATile::rows / depth_of_product(type); ++k) {
    ptx::Wgmma<columns, type>::template from_shared<true, true>(&o.tile[0][0][0], Descriptor<ATile>::rows(a, k),
                                                                Descriptor<BTile>::rows(b, k), k > 0);
  }
  ptx::wgmma_commit();
}

/// Begins O += P·V, or its steps `first` to `last` − 1 along the keys, each of depth_of_product(type) rows of V. O may
/// have more columns than V: those beyond are products with the first columns of a panel that lies behind V.
template <Element type, class VTile, int first = 0, int last = VTile::rows / depth_of_product(type), int column_tiles>
__device__ __forceinline__ void begin_outputs(Accumulator<1, column_tiles>& o,
                                              const u32 (&p)[VTile::rows / depth_of_product(type)][4], u32 values) {
  static_assert(column_tiles * 8 >= VTile::columns && column_tiles * 8 <= VTile::columns + VTile::panel_columns);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = first; k < last; ++k) {
    ptx::Wgmma<column_tiles * 8, type>::from_registers(&o.tile[0][0][0], p[k], Descriptor<VTile>::rows(values, k),
                                                       true);
  }
  ptx::wgmma_commit();
}

/// Begins O += P·V of e4m3, with V transposed (tile/transposed_bytes.cuh) and P packed by pack_bytes there.
template <class VtTile, int steps>
__device__ __forceinline__ void begin_byte_outputs(Accumulator<1, VtTile::rows / 8>& o, const u32 (&p)[steps][4],
                                                   u32 values) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < steps; ++k) {
    ptx::Wgmma<VtTile::rows, VtTile::type>::from_registers(&o.tile[0][0][0], p[k],
                                                           Descriptor<VtTile>::columns(values, k), true);
  }
  ptx::wgmma_commit();
}

}  // namespace tessera::cuda
