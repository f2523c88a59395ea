// SPDX-License-Identifier: Apache-2.0
// Values that are not finite. The products with V add 0 · v for every hidden key, which is NaN where v is NaN or
// infinite. That shows in the output, where a block looks for it once, at its end; a block that finds any walks its
// keys again, first with such values as zeros, whose bits in the output are those of any finite hidden value, then once
// for NaN, +∞ and −∞ each to learn which elements see one.
#pragma once

#include "cuda/policy/softmax.cuh"

namespace tessera::cuda {

enum class Walk : int {
  plain,
  finite,    // values that are not finite count as 0
  nan,       // these three count the visible values of their kind: P is 1 or 0, V too
  infinity,  // +∞
  negative_infinity,
};

/// Bits of a 16-bit type.
template <Element type>
struct HalfBits {
  static constexpr u32 infinity = type == Element::bf16 ? 0x7F80 : 0x7C00;
  static constexpr u32 one = type == Element::bf16 ? 0x3F80 : 0x3C00;
  static constexpr u32 quiet_nan = 0x7FFF;

  static __device__ __forceinline__ bool is_nan(u32 bits) { return (bits & 0x7FFF) > infinity; }
  static __device__ __forceinline__ bool is_kind(u32 bits, Walk walk) {
    if (walk == Walk::nan) return is_nan(bits);
    return bits == (walk == Walk::infinity ? infinity : 0x8000 | infinity);
  }
  /// What stands for a value in a walk.
  static __device__ __forceinline__ u32 replaced(u32 bits, Walk walk) {
    if (walk == Walk::finite) return (bits & infinity) == infinity ? 0 : bits;
    return is_kind(bits, walk) ? one : 0;
  }
  /// What an output becomes that sees a value of the walk's kind.
  static __device__ __forceinline__ u32 spoiled(u32 bits, Walk walk) {
    const u32 kind = walk == Walk::infinity ? infinity : 0x8000 | infinity;
    const bool opposite = (bits & 0x7FFF) == infinity && bits != kind;
    return walk == Walk::nan || is_nan(bits) || opposite ? quiet_nan : kind;
  }
};

/// A tile of V in shared memory, by all threads; between barriers.
template <Element type, class Tile, int threads>
__device__ __forceinline__ void replace_values(u32 tile, Walk walk, int thread) {
#pragma unroll 1
  for (int at = thread * 16; at < Tile::bytes; at += threads * 16) {
    u32 value[4];
    ptx::load_shared_16(value, tile + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low = HalfBits<type>::replaced(value[i] & 0xFFFF, walk);
      const u32 high = HalfBits<type>::replaced(value[i] >> 16, walk);
      ptx::store_shared_4(tile + at + i * 4, low | high << 16);
    }
  }
}

/// Masked scores of a counting walk: 0, hence P = 1, for what is visible.
template <int row_tiles, int column_tiles>
__device__ __forceinline__ void count_visible(Accumulator<row_tiles, column_tiles>& s) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.tile[m][n][i] = s.tile[m][n][i] == -kInfinity ? -kInfinity : 0.0F;
    }
  }
}

template <int row_tiles, int column_tiles>
__device__ __forceinline__ bool is_finite(const Accumulator<row_tiles, column_tiles>& o) {
  float zero = 0.0F;
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) zero = __fmaf_rn(o.tile[m][n][i], 0.0F, zero);
    }
  }
  return zero == 0.0F;
}

/// Spoils the outputs at `to`, 16 bytes of 16-bit elements, where `counts` says that they see a value of the kind.
template <Element type>
__device__ __forceinline__ void spoil(u32 (&counts)[4], const char* to, Walk walk) {
  const u32* old = reinterpret_cast<const u32*>(to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 bits = old[i];
    const u32 low = (counts[i] & 0xFFFF) != 0 ? HalfBits<type>::spoiled(bits & 0xFFFF, walk) : bits & 0xFFFF;
    const u32 high = counts[i] >> 16 != 0 ? HalfBits<type>::spoiled(bits >> 16, walk) : bits >> 16;
    counts[i] = low | high << 16;
  }
}

/// The same for an fp32 output.
__device__ __forceinline__ float spoiled(float old, float count, Walk walk) {
  if (count == 0.0F) return old;
  if (walk == Walk::nan) return kInfinity - kInfinity;
  return old + (walk == Walk::infinity ? kInfinity : -kInfinity);
}

}  // namespace tessera::cuda
