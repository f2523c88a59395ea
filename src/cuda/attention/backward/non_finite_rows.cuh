// SPDX-License-Identifier: Apache-2.0
// Rows of tiles that hold a value that is not finite: of tiles that stream, and of K in a block that adds up dQ. As
// 0 · NaN is not 0, such values become zeros, in streamed tiles only if these hide an element; elements that see the
// row become NaN instead.
#pragma once

#include "cuda/attention/softmax/non_finite.cuh"
#include "shared/types.h"

namespace tessera::cuda {

inline constexpr float kNaN = __builtin_bit_cast(float, 0x7fffffffU);
inline constexpr int kNonFiniteQk = 1, kNonFiniteOv = 2;

/// `first`: of the tile that S is computed from, Q or K; `second`: of dO.
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

  // The functions below are called by `threads` threads, numbered from 0. Products may still read the tile: what they
  // find in a replaced row does not matter (BwdProducer::replace_rows).

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
