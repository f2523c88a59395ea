// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.8 and 9.7.9.12: memory that a kernel reads once and writes once.
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

}  // namespace tessera::cuda::ptx
