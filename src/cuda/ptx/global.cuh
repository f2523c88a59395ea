// SPDX-License-Identifier: Apache-2.0
// Accesses to global memory (PTX ISA 9.7.9.8 and 9.7.9.12): data that a kernel reads or writes only once, and counts
// for which blocks wait.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// Loads 16 bytes without allocating a line of L1. It is volatile, so that loads are issued in source order.
__device__ __forceinline__ void load_once_16(u32 (&value)[4], const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(from)
               : "memory");
}

/// Makes the compiler compute an address in global memory here, before the branch or wait that follows.
template <class T>
__device__ __forceinline__ void known_here(T*& address) {
  asm volatile("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
}

/// Loads element `index` of an array of int32 or int64; without an array, returns `index`. There is no branch, so that
/// code that does not depend on the element runs while the load is in flight.
__device__ __forceinline__ i64 load_index(const void* array, bool is_long, int index) {
  u32 low = static_cast<u32>(index), high = 0;
  const u64 first = reinterpret_cast<u64>(array);
  const u64 at = first + static_cast<u64>(index) * (is_long ? 8U : 4U);
  asm volatile(
      "{\n"
      ".reg .pred some, wide;\n"
      "setp.ne.u64 some, %2, 0;\n"
      "setp.ne.and.u32 wide, %3, 0, some;\n"
      "@some ld.global.u32 %0, [%4];\n"
      "@wide ld.global.u32 %1, [%4 + 4];\n"
      "}\n"
      : "+r"(low), "+r"(high)
      : "l"(first), "r"(static_cast<u32>(is_long)), "l"(at)
      : "memory");
  const u32 sign = static_cast<u32>(static_cast<int>(low) >> 31);
  return static_cast<i64>(static_cast<u64>(is_long ? high : sign) << 32 | low);
}

/// Waits until a count in memory is at least `least`. What the block that raised it had written before is then visible.
/// That block must be earlier in the grid than this one, because a later block may never begin.
__device__ __forceinline__ void await_count(const int* count, int least) {
  asm volatile(
      "{\n"
      ".reg .pred fewer;\n"
      ".reg .s32 found;\n"
      "again:\n"
      "ld.acquire.gpu.global.s32 found, [%0];\n"
      "setp.lt.s32 fewer, found, %1;\n"
      "@fewer bra again;\n"
      "}\n" ::"l"(count),
      "r"(least)
      : "memory");
}
/// A proxy fence between reductions by the TMA, before or after it, and accesses to counts.
__device__ __forceinline__ void fence_sums() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }
/// Raises a count for await_count() of other blocks, after this thread's earlier writes. A count never falls, so that
/// no block waits forever if wrong sequence boundaries make two sequences share a count.
__device__ __forceinline__ void raise_count(int* count, int value) {
  asm volatile("red.release.gpu.global.max.s32 [%0], %1;\n" ::"l"(count), "r"(value) : "memory");
}

/// Stores 16 bytes that no kernel reads soon: L2 evicts them first.
__device__ __forceinline__ void store_once_16(void* to, const u32 (&value)[4]) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

}  // namespace tessera::cuda::ptx
