// SPDX-License-Identifier: Apache-2.0
// mma.sync (PTX ISA 9.7.14.5.8): m16n8k16 of 16-bit operands with fp32 accumulation, SM80 and newer; m16n8k32 of e4m3
// with fp32 accumulation, SM89 and newer; m16n8k32 of int8 with int32 accumulation, SM80 and newer. In a register of
// m16n8k32 four columns of A, or rows of B, take the place of two.
//
// With g = lane / 4 and t = lane % 4, a lane holds
//
//     A (16x16)  a[0] row g     columns 2t, 2t+1        B (16x8)  b[0] rows 2t, 2t+1      column g
//                a[1] row g+8   columns 2t, 2t+1                  b[1] rows 2t+8, 2t+9    column g
//                a[2] row g     columns 2t+8, 2t+9
//                a[3] row g+8   columns 2t+8, 2t+9      C (16x8)  c[0], c[1] row g        columns 2t, 2t+1
//                                                                 c[2], c[3] row g+8      columns 2t, 2t+1
//
// So two neighbouring C tiles, rounded to 16 bits, are an A tile: each lane has the values that it needs.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (type == Element::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k32_int8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace tessera::cuda::ptx
