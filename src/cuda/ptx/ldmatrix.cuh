// SPDX-License-Identifier: Apache-2.0
// ldmatrix (PTX ISA 9.7.14.5.15) loads four 8x8 matrices of 16-bit elements from shared memory to a warp.
//
// Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes a row). In register i it receives, of matrix i:
//
//     plain      row l / 4, columns 2·(l % 4) and + 1
//     transposed column l / 4, rows 2·(l % 4) and + 1
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

__device__ __forceinline__ void ldmatrix_x4(u32 (&to)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(u32 (&to)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}

/// Stores four matrices, not transposed (PTX ISA 9.7.14.5.16). SM90 and newer.
__device__ __forceinline__ void stmatrix_x4(u32 row_address, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row_address), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

}  // namespace tessera::cuda::ptx
