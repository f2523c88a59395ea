// SPDX-License-Identifier: Apache-2.0
// The list of the best blocks of a tile so far. A warp holds it; lane l has entries l, l + 32, …. Entries are 64-bit
// numbers in descending order, 0 is no entry. The upper half is the score, mapped so that integers compare like scores.
// The lower half is the complement of the block's index, so that of equal scores the lower block comes first.
#pragma once

#include "cuda/sparse/select_work.cuh"

namespace tessera::cuda {

/// A NaN counts as −∞.
__device__ __forceinline__ u64 entry_of(float score, int block) {
  const float number = score == score ? score + 0.0F : -kInfinity;  // −0 is 0
  const u32 bits = __float_as_uint(number);
  const u32 ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<u64>(ordered) << 32 | ~static_cast<u32>(block);
}
__device__ __forceinline__ float score_of(u64 entry) {
  const auto ordered = static_cast<u32>(entry >> 32);
  return __uint_as_float((ordered & 0x80000000U) != 0 ? ordered ^ 0x80000000U : ~ordered);
}
__device__ __forceinline__ int block_of(u64 entry) { return static_cast<int>(~static_cast<u32>(entry)); }

template <int slots>
struct BlockList {
  u64 entry[slots];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ __forceinline__ void load(const u64* from, int count) {
#pragma unroll
    for (int s = 0; s < slots; ++s) entry[s] = s * 32 + lane() < count ? from[s * 32 + lane()] : 0;
  }
  __device__ __forceinline__ void store(u64* to, int count) const {
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      if (s * 32 + lane() < count) to[s * 32 + lane()] = entry[s];
    }
  }

  /// Returns entry `index` to all lanes.
  __device__ __forceinline__ u64 at(int index) const {
    u64 found = 0;
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const u64 of_slot = __shfl_sync(0xffffffffU, entry[s], index % 32);
      if (index / 32 == s) found = of_slot;
    }
    return found;
  }

  __device__ __forceinline__ void insert(u64 next) {
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const int larger = __popc(__ballot_sync(0xffffffffU, entry[s] > next));
      const u64 above = __shfl_up_sync(0xffffffffU, entry[s], 1);
      const u64 last = __shfl_sync(0xffffffffU, entry[s], 31);
      if (larger == 32) continue;
      entry[s] = lane() < larger ? entry[s] : lane() == larger ? next : above;
      next = last;
    }
  }

  /// One step of a bitonic sort: lanes that differ in bit `distance` exchange entries, so that the lower lane has the
  /// larger entry, or with `ascends` the smaller one.
  static __device__ __forceinline__ u64 exchange(u64 own, int distance, bool ascends) {
    const u64 other = __shfl_xor_sync(0xffffffffU, own, distance);
    const bool wants_larger = ((lane() & distance) == 0) != ascends;
    return (own > other) == wants_larger ? own : other;
  }

  /// Merges the candidates of all lanes into the list (Batcher's bitonic sort, 1968). The candidates are sorted in
  /// ascending order, the list is in descending order. Their elementwise maxima are thus the best 32 of both, as a
  /// bitonic sequence, which is then sorted.
  __device__ __forceinline__ void merge(u64 candidate) {
    static_assert(slots == 1);
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
      for (int distance = size / 2; distance > 0; distance /= 2) {
        candidate = exchange(candidate, distance, (lane() & size) == 0);
      }
    }
    entry[0] = candidate > entry[0] ? candidate : entry[0];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) entry[0] = exchange(entry[0], distance, false);
  }

  /// Each lane has one candidate, or 0; the best `places` of them and of the list stay.
  __device__ __forceinline__ void offer(u64 candidate, int places) {
    u64 least = at(places - 1);
    u32 waiting = __ballot_sync(0xffffffffU, candidate > least);
    if constexpr (slots == 1) {
      constexpr int worth_sorting = 7;  // inserting so many candidates takes as many instructions
      if (__popc(waiting) >= worth_sorting) {
        merge(candidate);
        return;
      }
    }
    while (waiting != 0) {
      const u64 next = __shfl_sync(0xffffffffU, candidate, __ffs(static_cast<int>(waiting)) - 1);
      waiting &= waiting - 1;
      if (next <= least) continue;
      insert(next);
      least = at(places - 1);
    }
  }

  /// Writes the forced blocks and those of the first `forced.places` entries, in ascending order, and then −1. Returns
  /// the number of blocks.
  __device__ __forceinline__ int write(int* to, const ForcedBlocks& forced, int top) const {
    const int initial = forced.initial_count();
    const int local = forced.local_count();
    int taken = 0;         // entries
    int before_local = 0;  // of them
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const bool counts = s * 32 + lane() < forced.places && entry[s] != 0;
      taken += __popc(__ballot_sync(0xffffffffU, counts));
      before_local += __popc(__ballot_sync(0xffffffffU, counts && block_of(entry[s]) < forced.local_begin));
    }
    for (int block = lane(); block < initial; block += 32) to[block] = block;
    for (int i = lane(); i < local; i += 32) to[initial + before_local + i] = forced.local_begin + i;
#pragma unroll
    for (int s = 0; s < slots; ++s) {
      const int block = block_of(entry[s]);
      int rank = 0;  // entries of lower blocks
      for (int i = 0; i < taken; ++i) rank += block_of(at(i)) < block ? 1 : 0;
      if (s * 32 + lane() >= taken) continue;
      to[initial + rank + (block >= forced.local_begin ? local : 0)] = block;
    }
    const int count = initial + local + taken;
    for (int i = count + lane(); i < top; i += 32) to[i] = -1;
    return count;
  }
};

}  // namespace tessera::cuda
