// SPDX-License-Identifier: Apache-2.0
// Row tiles for blocks that take one after another: the first is that of the block's number, the others are drawn, so
// that who has finished a short one takes the next. The counter lies in the plan's workspace, whose content is anything
// at first; to clear it would be a launch of its own. So its upper 40 bits tell whether it counts already: they are the
// plan's tag then. Who draws the last number clears it for the next run. (The bits of a workspace that was never used
// are taken for a count with a probability of 2^-40.)
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

/// The next number from 0 on; every block that has a row tile of its own draws until it gets one that is too large:
/// `count`, the number of row tiles, draws of all together. By one thread of a block.
__device__ __forceinline__ int draw(const TicketParams& tickets, int count) {
  constexpr int kCountBits = 24;
  u64 seen = *static_cast<volatile u64*>(tickets.counter);
  int number = 0;
  while (true) {
    if (seen >> kCountBits == tickets.tag) {
      number = static_cast<int>(atomicAdd(tickets.counter, u64{1}) & ((u64{1} << kCountBits) - 1));
      break;
    }
    const u64 found = atomicCAS(tickets.counter, seen, tickets.tag << kCountBits | 1);
    if (found == seen) break;
    seen = found;
  }
  if (number == count - 1) atomicExch(tickets.counter, u64{0});
  return number;
}

}  // namespace tessera::cuda
