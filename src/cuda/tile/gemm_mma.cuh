// SPDX-License-Identifier: Apache-2.0
// Products of a warp's rows with a tile in shared memory, by mma.sync. Fragments are those of ptx/mma_sync.cuh.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma_sync.cuh"
#include "cuda/tile/swizzle.cuh"

namespace tessera::cuda {

/// The type of accumulators: int for products of int8, else float.
template <bool integers>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<true> {
  using type = int;
};

/// A thread's accumulators of `row_tiles` x `column_tiles` tiles of 16 x 8: fp32, or int for products of int8.
template <int row_tiles, int column_tiles, class Number = float>
struct Accumulator {
  Number tile[row_tiles][column_tiles][4];

  __device__ __forceinline__ void clear(Number first = Number{0}) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[m][n][i] = first;
      }
    }
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[m][n][i] *= factor;
      }
    }
  }
};

/// Packs two neighbouring 16 x 8 tiles to an A operand.
template <Element type>
__device__ __forceinline__ void pack_fragment(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = ptx::pack<type>(left[0], left[1]);
  a[1] = ptx::pack<type>(left[2], left[3]);
  a[2] = ptx::pack<type>(right[0], right[1]);
  a[3] = ptx::pack<type>(right[2], right[3]);
}

// These return a lane's address of a tile's first fragment, from which chunk_pair and rows_below derive all others.

template <class Tile>
__device__ __forceinline__ u32 rows_address(u32 base, int first_row, int lane) {
  return base + Tile::at(first_row + lane % 16, lane / 16);
}
template <class KTile>
__device__ __forceinline__ u32 keys_address(u32 base, int lane) {
  return base + KTile::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class VTile>
__device__ __forceinline__ u32 values_address(u32 base, int lane) {
  return base + VTile::at(lane % 16, lane / 16);
}

/// Loads A's fragments of one k-tile: kProductBytes of columns, 16 of 16-bit elements.
template <class Tile, int row_tiles>
__device__ __forceinline__ void load_rows(u32 (&a)[row_tiles][4], u32 address, int k_tile) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
    ptx::ldmatrix_x4(a[m], Tile::chunk_pair(address, k_tile) + Tile::rows_below(m * 16));
  }
}

/// The same, with the columns in the order of gemm_bytes.cuh. `address`: that of row lane / 4, column 4·(lane % 4).
template <class Tile, int row_tiles>
__device__ __forceinline__ void load_rows_of_bytes(u32 (&a)[row_tiles][4], u32 address, int k_tile) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float pair[2];
      ptx::load_shared_8(pair[0], pair[1], Tile::chunk_pair(address, k_tile) + Tile::rows_below(m * 16 + half * 8));
      a[m][half] = __float_as_uint(pair[0]);
      a[m][half + 2] = __float_as_uint(pair[1]);
    }
  }
}

/// A warp's rows of an A operand in shared memory. Fragments of the first `kept_tiles` k-tiles are loaded once, the
/// others at every use. `of_bytes`: for products with an 8-bit B operand.
template <class Tile, int row_tiles, int kept_tiles, bool of_bytes = false>
struct Rows {
  u32 address;
  u32 kept[kept_tiles > 0 ? kept_tiles : 1][row_tiles][4];

  __device__ __forceinline__ Rows(u32 base, int first_row, int lane)
      : address(of_bytes ? base + Tile::at(first_row + lane / 4, lane / 2 % 2) + lane % 2 * 8
                         : rows_address<Tile>(base, first_row, lane)) {
#pragma unroll
    for (int k = 0; k < kept_tiles; ++k) load(kept[k], k);
  }
  __device__ __forceinline__ void load(u32 (&a)[row_tiles][4], int k_tile) const {
    if constexpr (of_bytes) {
      load_rows_of_bytes<Tile>(a, address, k_tile);
    } else {
      load_rows<Tile>(a, address, k_tile);
    }
  }
  __device__ __forceinline__ void read(u32 (&a)[row_tiles][4], int k_tile) const {
    if (k_tile < kept_tiles) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = kept[k_tile][m][i];
      }
    } else {
      load(a, k_tile);
    }
  }
};

/// One mma.sync; int8 has integer accumulators.
template <Element type, class Number>
__device__ __forceinline__ void multiply(Number (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (type == Element::int8) {
    ptx::mma_m16n8k32_int8(c, a, b0, b1);
  } else {
    ptx::mma_m16n8k16<type>(c, a, b0, b1);
  }
}

/// S += A · Kᵀ for one k-tile. K (keys, d) is in shared memory, A's fragments are in registers.
template <Element type, class KTile, int row_tiles, class Number>
__device__ __forceinline__ void multiply_keys(Accumulator<row_tiles, KTile::rows / 8, Number>& s,
                                              const u32 (&a)[row_tiles][4], u32 address, int k_tile) {
#pragma unroll
  for (int n = 0; n < KTile::rows / 16; ++n) {
    u32 b[4];
    ptx::ldmatrix_x4(b, KTile::chunk_pair(address, k_tile) + KTile::rows_below(n * 16));
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      multiply<type>(s.tile[m][2 * n], a[m], b[0], b[1]);
      multiply<type>(s.tile[m][2 * n + 1], a[m], b[2], b[3]);
    }
  }
}

/// Computes the products of a warp's rows with all keys of a tile, and overwrites S with finish(half, column, product)
/// in those halves of the rows that `which` selects. `rows`, `keys`: rows_address and keys_address.
template <Element type, class QTile, class KTile, class Finish>
__device__ __forceinline__ void overwrite_scores(Accumulator<1, KTile::rows / 8>& s, const bool (&which)[2], u32 rows,
                                                 u32 keys, Finish finish) {
#pragma unroll
  for (int n = 0; n < KTile::rows / 8; ++n) {
    float c[4] = {};
#pragma unroll 1
    for (int k = 0; k < KTile::columns / depth_of_product(type); ++k) {
      u32 a[1][4];
      u32 b[4];
      load_rows<QTile>(a, rows, k);
      ptx::ldmatrix_x4(b, KTile::chunk_pair(keys, k) + KTile::rows_below(n / 2 * 16));
      if constexpr (type == Element::e4m3) {
        ptx::mma_m16n8k32_e4m3(c, a[0], b[n % 2 * 2], b[n % 2 * 2 + 1]);
      } else {
        multiply<type>(c, a[0], b[n % 2 * 2], b[n % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (which[i / 2]) s.tile[0][n][i] = finish(i / 2, n * 8 + i % 2, c[i]);
    }
  }
}

/// O += P · V for 16 keys. P's fragments are in registers, V (keys, dv) is in shared memory.
template <Element type, class VTile, int row_tiles>
__device__ __forceinline__ void multiply_values(Accumulator<row_tiles, VTile::columns / 8>& o,
                                                const u32 (&p)[row_tiles][4], u32 address, int key_tile) {
#pragma unroll
  for (int n = 0; n < VTile::columns / 16; ++n) {
    u32 b[4];
    ptx::ldmatrix_x4_transposed(b, VTile::chunk_pair(address, n) + VTile::rows_below(key_tile * 16));
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      ptx::mma_m16n8k16<type>(o.tile[m][2 * n], p[m], b[0], b[1]);
      ptx::mma_m16n8k16<type>(o.tile[m][2 * n + 1], p[m], b[2], b[3]);
    }
  }
}

}  // namespace tessera::cuda
