// SPDX-License-Identifier: Apache-2.0
// Exchanges between the four lanes that share a row of an accumulator, after which each lane has adjacent columns to
// store.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

/// Transposes words among four lanes: word i of lane j becomes word j of lane i. `lane`: 0 to 3. A whole warp calls
/// this.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      u32& kept = words[i];
      u32& other = words[i + step];
      const u32 got = __shfl_xor_sync(0xffffffffU, upper ? kept : other, step);
      (upper ? kept : other) = got;
    }
  }
}

/// A selector for __byte_perm: the upper or the lower halves of two words; `second_first`: that of the second word is
/// the lower half of the result.
__device__ __forceinline__ u32 halves(bool upper, bool second_first) {
  const u32 selector = upper ? 0x7632 : 0x5410;
  return second_first ? __byte_perm(selector, 0, 0x4401) : selector;
}

/// Each of four lanes has 16 bits of each of four tiles: of tiles 0 and 1 in `low`, of tiles 2 and 3 in `high`. Lane i
/// gets all 64 bits of tile i, with those of lane 0 first. `lane`: 0 to 3. A whole warp calls this.
__device__ __forceinline__ uint2 gather_quad(u32 low, u32 high, int lane) {
  const bool upper = (lane & 2) != 0;
  const bool odd = (lane & 1) != 0;
  const u32 own = upper ? high : low;  // two tiles; one of them is this lane's
  const u32 got = __shfl_xor_sync(0xffffffffU, upper ? low : high, 2);
  const u32 kept = __byte_perm(own, got, halves(odd, upper));  // of `lane` and the other lane of the same parity
  const u32 other = __shfl_xor_sync(0xffffffffU, __byte_perm(own, got, halves(!odd, upper)), 1);
  return make_uint2(__byte_perm(kept, other, halves(false, odd)), __byte_perm(kept, other, halves(true, odd)));
}

}  // namespace tessera::cuda
