// SPDX-License-Identifier: Apache-2.0
// Two-level accumulation. The tensor cores of SM90 keep 14 bits of a sum of e4m3 products and truncate the rest, so
// that each step loses half a unit in the last place on average: over 16384 keys some 1.5%. So from time to time O is
// added to fp32 sums in shared memory and cleared.
#pragma once

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

/// The sums of a thread: 16 bytes for each 8 columns, and 8 bytes for the softmax origins to which they are relative.
/// Those of `threads` threads are interleaved. The struct is constructed where it is used, so that it takes no
/// registers in between.
template <int columns, int threads>
struct PromotedSums {
  using Output = Accumulator<1, columns / 8>;
  static constexpr int bytes = threads * (columns * 2 + 8);

  u32 memory;  // shared
  int thread;

  /// Adds O, which is relative to the origins `now`, to the sums, and clears O. `first`: there are no sums yet.
  __device__ __forceinline__ void take(Output& o, const float (&now)[2], bool first) const {
    if (!first) add_to(o, now);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) ptx::store_shared_16(at(n), o.tile[0][n]);
    ptx::store_shared_4(origins(), __float_as_uint(now[0]));
    ptx::store_shared_4(origins() + 4, __float_as_uint(now[1]));
    o.clear();
  }
  /// Adds the sums to O.
  __device__ __forceinline__ void add_to(Output& o, const float (&now)[2]) const {
    float before[2];
    ptx::load_shared_8(before[0], before[1], origins());
    const float factors[2] = {ptx::exp2(before[0] - now[0]), ptx::exp2(before[1] - now[1])};
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      float sums[4];
      ptx::load_shared_16(sums, at(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) o.tile[0][n][i] = __fmaf_rn(sums[i], factors[i / 2], o.tile[0][n][i]);
    }
  }

 private:
  __device__ __forceinline__ u32 at(int n) const {
    return memory + static_cast<u32>(thread) * 16 + static_cast<u32>(n * threads * 16);
  }
  __device__ __forceinline__ u32 origins() const {
    return memory + static_cast<u32>(threads * columns * 2) + static_cast<u32>(thread) * 8;
  }
};

}  // namespace tessera::cuda
