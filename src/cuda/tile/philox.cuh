// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11), the counter-based generator of dropout.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

struct Philox {
  u32 word[4];

  /// Turns a counter into four random words.
  __device__ __forceinline__ Philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 key0, u32 key1) : word{c0, c1, c2, c3} {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const u32 a_low = 0xD2511F53U * word[0];
      const u32 a_high = __umulhi(0xD2511F53U, word[0]);
      const u32 b_low = 0xCD9E8D57U * word[2];
      const u32 b_high = __umulhi(0xCD9E8D57U, word[2]);
      word[0] = b_high ^ word[1] ^ key0;
      word[1] = b_low;
      word[2] = a_high ^ word[3] ^ key1;
      word[3] = a_low;
      key0 += 0x9E3779B9U;
      key1 += 0xBB67AE85U;
    }
  }

  /// Returns 16-bit draw 0 … 7; the low half of each word comes first. It uses selections, because an index that is not
  /// constant would move the words to local memory.
  __device__ __forceinline__ u32 draw(u32 number) const {
    const u32 low = (number & 2) != 0 ? word[1] : word[0];
    const u32 high = (number & 2) != 0 ? word[3] : word[2];
    return ((number & 4) != 0 ? high : low) >> ((number & 1) * 16) & 0xFFFFU;
  }
};

}  // namespace tessera::cuda
