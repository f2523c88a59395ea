// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.8 and 9.7.9.12: memory that a kernel reads once or writes once, and counts that blocks wait for.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// 16 bytes that L1 need not keep. Volatile: loads are issued in the order in which they are written down.
__device__ __forceinline__ void load_once_16(u32 (&value)[4], const void* from) {
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(from)
               : "memory");
}

/// Has an address in global memory computed before what follows, a branch or a wait.
template <class T>
__device__ __forceinline__ void known_here(T*& address) {
  asm volatile("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
}

/// Integer `index` of an array of int32 or int64; without an array the index. No branch, so that what does not depend
/// on it is computed while it is on its way.
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

/// Until a count in memory is `least` or more, and what the block that raised it had done before is done. That must be
/// a block in front of this one in the grid: one behind it may never begin.
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
/// Orders sums by TMA, before it and behind it, with counts.
__device__ __forceinline__ void fence_sums() { asm volatile("fence.proxy.async.global;\n" ::: "memory"); }
/// For await_count() of other blocks, behind what the thread has done. A count never falls: where wrong sequence
/// boundaries make two sequences share one, nobody waits forever.
__device__ __forceinline__ void raise_count(int* count, int value) {
  asm volatile("red.release.gpu.global.max.s32 [%0], %1;\n" ::"l"(count), "r"(value) : "memory");
}

/// 16 bytes that no kernel soon reads: the first that L2 gives up.
__device__ __forceinline__ void store_once_16(void* to, const u32 (&value)[4]) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(value[0]), "r"(value[1]), "r"(value[2]),
               "r"(value[3])
               : "memory");
}

}  // namespace tessera::cuda::ptx
