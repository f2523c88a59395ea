// SPDX-License-Identifier: Apache-2.0
// The two products of a warp's rows with a tile of keys and values in shared memory, by mma.sync.
#pragma once

#include "cuda/attention/scores/descales.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/tile/gemm_bytes.cuh"
#include "shared/config.h"

namespace tessera::cuda {

template <FwdConfig C>
struct WarpProducts {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using QTile = SharedTile<C.q_type(), C.tile_q, C.d>;
  using KTile = SharedTile<C.k_type(), C.tile_kv, C.d>;
  using VTile = SharedTile<C.v_type(), C.tile_kv, C.dv>;
  using Scores = Accumulator<row_tiles, C.tile_kv / 8>;
  using Products = Accumulator<row_tiles, C.tile_kv / 8, typename SumOf<C.int8_scores>::type>;
  using Output = Accumulator<row_tiles, C.dv / 8>;
  using Queries = Rows<QTile, row_tiles, C.q_kept / depth_of_product(C.q_type()), C.eight_bits>;

  /// S = Q·Kᵀ; with int8 in integers.
  static __device__ __forceinline__ void find_scores(Products& s, const Queries& q, u32 k_at, int lane) {
    s.clear(first_sum());
    const u32 keys = keys_address<KTile>(k_at, lane);
#pragma unroll
    for (int k = 0; k < C.d / depth_of_product(C.k_type()); ++k) {
      if constexpr (C.eight_bits) {
        u32 a[2][row_tiles][4];
        q.read(a[0], 2 * k);
        q.read(a[1], 2 * k + 1);
        multiply_byte_keys<C.q_type(), KTile>(s, a, keys, k);
      } else {
        u32 a[row_tiles][4];
        q.read(a, k);
        multiply_keys<C.k_type(), KTile>(s, a, keys, k);
      }
    }
  }

  static constexpr auto first_sum() {
    if constexpr (C.int8_scores) {
      return Int8Scores<C>::kFirst;
    } else {
      return 0.0F;
    }
  }

  /// O += P·V. The exponentials of 16 keys overlap the products of the 16 keys before. Fragments of P are packed from
  /// those of S in place. `warp_row`: first row of the warp within the block.
  template <TileWork Work, class Online>
  static __device__ __forceinline__ void add_values(const AttentionParams& p, const Work& work, int warp_row, int lane,
                                                    const KvTile& tile, u32 v_at, Output& o, Scores& s,
                                                    Online& softmax) {
    KeptBits<C> kept[row_tiles];
    if constexpr (C.dropout) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) kept[m].draw(p, work, warp_row + m * 16, tile, lane);
    }
    const u32 values = values_address<VTile>(v_at, lane);
#pragma unroll
    for (int k = 0; k < C.tile_kv / 16; ++k) {
      u32 a[row_tiles][4];
      u32 rest[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        auto& left = s.tile[m][2 * k];
        auto& right = s.tile[m][2 * k + 1];
        softmax.exponentiate(m, left, softmax_scale(p, work));
        softmax.exponentiate(m, right, softmax_scale(p, work));
        if constexpr (C.keeps_rests()) {
          softmax.template split<C.p_type()>(m, left, right, a[m], rest[m]);
          if constexpr (C.dropout) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const u32 kept_halves = kept[m].mask(k, i);
              a[m][i] &= kept_halves;
              rest[m][i] &= kept_halves;
            }
          }
          continue;
        }
        if constexpr (C.dropout) {
          kept[m].apply(left, k, 0);
          kept[m].apply(right, k, 1);
        }
        a[m][0] = ptx::pack<C.p_type()>(left[0], left[1]);
        a[m][1] = ptx::pack<C.p_type()>(left[2], left[3]);
        a[m][2] = ptx::pack<C.p_type()>(right[0], right[1]);
        a[m][3] = ptx::pack<C.p_type()>(right[2], right[3]);
        if constexpr (C.rounded_sums) softmax.template add_rounded<C.p_type()>(m, a[m]);
      }
      add_products(o, a, values, k);
      if constexpr (C.keeps_rests()) add_products(o, rest, values, k);
    }
  }
  static __device__ __forceinline__ void add_products(Output& o, const u32 (&p)[row_tiles][4], u32 values, int k) {
    if constexpr (C.eight_bits) {
      multiply_byte_values<C.p_type(), VTile>(o, p, values, k);
    } else {
      multiply_values<C.type, VTile>(o, p, values, k);
    }
  }

  template <class Work>
  static __device__ __forceinline__ float softmax_scale(const AttentionParams& p, const Work& work) {
    if constexpr (C.descales_at_once()) return work.score;
    return C.scale_first ? 1.0F : p.scale * kLog2E;
  }
};

}  // namespace tessera::cuda
