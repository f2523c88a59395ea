// SPDX-License-Identifier: Apache-2.0
// Rows with values that are not finite, in streamed tiles and in the own K of a block that computes dQ. A hidden
// element multiplies them by 0, but 0 · NaN is NaN. So they are replaced by zeros, in streamed tiles only if the tile
// hides an element, and the elements that see such a row are set to NaN instead.
#pragma once

#include "cuda/attention/softmax/non_finite.cuh"
#include "shared/types.h"

namespace tessera::cuda {

inline constexpr float kNaN = __builtin_bit_cast(float, 0x7fffffffU);
inline constexpr int kNonFiniteQk = 1, kNonFiniteOv = 2;

/// `first`: rows of Q or K, the operand of S; `second`: rows of dO.
template <Element type, int rows>
struct NonFiniteRows {
  static constexpr int words = divide_up(rows, 32);
  u32 first[words], second[words];  // a bit for each row

  __device__ __forceinline__ int of(int row) const {
    const auto bit = [row](const u32* words) {
      return __float_as_uint(ptx::load_shared_4(ptx::shared_address(words + row / 32))) >> row % 32 & 1;
    };
    return static_cast<int>(bit(first) * kNonFiniteQk + bit(second) * kNonFiniteOv);
  }

  // `threads` threads, numbered from 0, call the functions below. Products may read the tile at the same time: what
  // they read of a replaced row does not matter (BwdProducer::replace_rows).

  template <int threads, class Tile>
  static __device__ __forceinline__ bool are_finite(u32 tile, int thread) {
    FiniteTest<type> test;
#pragma unroll 2
    for (int at = thread * kChunkBytes; at < Tile::bytes; at += threads * kChunkBytes) {
      u32 value[4];
      ptx::load_shared_16(value, tile + at);
      test.look_at(value);
    }
    return test.passed();
  }
  /// A barrier of the threads must follow.
  __device__ __forceinline__ void clear(int thread) {
    if (thread < words) first[thread] = second[thread] = 0;
  }
  template <int threads, class Tile>
  static __device__ __forceinline__ void replace(u32 tile, u32* non_finite, int thread) {
#pragma unroll 1
    for (int at = thread * kChunkBytes; at < Tile::bytes; at += threads * kChunkBytes) {
      u32 value[4];
      ptx::load_shared_16(value, tile + at);
      bool replaced = false;
#pragma unroll
      for (u32& pair : value) {
        const u32 kept = finite_of<type>(pair);
        replaced |= pair != kept;
        pair = kept;
      }
      if (!replaced) continue;
      const int row = Tile::row_of(at);
      atomicOr(non_finite + row / 32, 1U << row % 32);
      ptx::store_shared_16(tile + at, value);
    }
  }
};

}  // namespace tessera::cuda
