// SPDX-License-Identifier: Apache-2.0
// wgmma (PTX ISA 9.7.15): asynchronous products by the four warps of a warpgroup together, m64nNk16 of 16-bit operands
// and m64nNk32 of e4m3 with fp32 accumulation, m64nNk32 of int8 with int32 accumulation; SM90 only (sm_90a).
//
// D (64 x N): warp w of the group holds rows 16w … 16w + 15, as N / 8 tiles C (16 x 8) of ptx/mma_sync.cuh side by
// side. A (64 x 16) comes from shared memory or from registers, where each warp has its 16 rows as the A (16 x 16) of
// mma_sync.cuh. B (16 x N) comes from shared memory. A descriptor describes a matrix in shared memory:
//
//     bits  0–13  address / 16                       16–29  leading offset / 16      32–45  stride offset / 16
//           62–63  swizzle: 1 = 128-byte rows, 2 = 64-byte rows (tile/swizzle.cuh)
//
// K-major matrices, whose rows run along k (Q, K): the stride offset is the distance from eight rows to the next eight.
// 8-bit operands are always K-major. In registers, a lane has four neighbours of an 8-bit A (64 x 32) where it has two
// of a 16-bit A. MN-major ("transposed") matrices, whose rows run across k (V): the stride offset is the distance from
// eight rows to the next eight, the leading offset that from a panel to the next.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// Must precede the first product, and any product after an access to its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
/// Waits until at most the `later` groups that were committed last are in flight.
template <int later>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(later) : "memory");
}

/// Keeps the compiler from moving uses of a result before the wait that precedes this.
__device__ __forceinline__ void wgmma_settle(float& result) { asm volatile("" : "+f"(result)::"memory"); }
__device__ __forceinline__ void wgmma_settle(int& result) { asm volatile("" : "+r"(result)::"memory"); }

/// Tells the compiler that the old value is not needed. The asm of a product has its results as inputs too, even if it
/// overwrites them, which would keep the old value in its register.
__device__ __forceinline__ void wgmma_discard(float& result) { asm volatile("" : "=f"(result)); }

/// Keeps the wait that follows this after the computation of `sum`, which is never negative. A wait has no operands, so
/// that ptxas would move it before that computation, which could then not overlap the products. ptxas does not move a
/// wait across an arrival at an mbarrier. The arrival here, at `barrier`, is never executed.
__device__ __forceinline__ void wgmma_wait_after(float sum, u32 barrier) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.f32 never, %0, 0fBF800000;\n"
      "@never mbarrier.arrive.shared::cta.b64 _, [%1];\n"
      "}\n" ::"f"(sum),
      "r"(barrier)
      : "memory");
}

/// D = A·B, or D += A·B with `add`. `d`: N / 2 registers.
template <int n, Element type>
struct Wgmma;

// 4 and 16 registers of D (8 and 32 columns) as operands of asm, and the numbers of 16 operands in its text.
#define TESSERA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TESSERA_D16(i) TESSERA_D4(i), TESSERA_D4(i + 4), TESSERA_D4(i + 8), TESSERA_D4(i + 12)
#define TESSERA_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define TESSERA_I16(i) TESSERA_I4(i), TESSERA_I4(i + 4), TESSERA_I4(i + 8), TESSERA_I4(i + 12)
#define TESSERA_N0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_N1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_N2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_N3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_N4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_N5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_N6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_N7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `text`: the element type in PTX; `numbers`: the operand numbers of the N / 2 registers of D; `i0` to `i5`: those of
// the operands that follow.
#define TESSERA_WGMMA(n, element, text, numbers, i0, i1, i2, i3, i4, i5, ...)                                       \
  template <>                                                                                                       \
  struct Wgmma<n, Element::element> {                                                                               \
    template <bool transposed = false /* B */, bool a_transposed = false>                                           \
    static __device__ __forceinline__ void from_shared(float* d, u64 a, u64 b, bool add) {                          \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i2                                                      \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" numbers "}, %" i0 ", %" i1  \
                   ", add, 1, 1, %" i4 ", %" i3 ";\n}\n"                                                            \
                   : __VA_ARGS__                                                                                    \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(transposed)),                 \
                     "n"(static_cast<int>(a_transposed)));                                                          \
    }                                                                                                               \
    /* B transposed. */                                                                                             \
    static __device__ __forceinline__ void from_registers(float* d, const u32 (&a)[4], u64 b, bool add) {           \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i5                                                      \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." text "." text " {" numbers "}, {%" i0 ", %" i1 \
                   ", %" i2 ", %" i3 "}, %" i4 ", add, 1, 1, 1;\n}\n"                                               \
                   : __VA_ARGS__                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));               \
    }                                                                                                               \
  }
// e4m3 operands cannot be transposed.
#define TESSERA_WGMMA_E4M3(n, numbers, i0, i1, i2, i3, i4, i5, ...)                                                  \
  template <>                                                                                                        \
  struct Wgmma<n, Element::e4m3> {                                                                                   \
    static __device__ __forceinline__ void from_shared(float* d, u64 a, u64 b, bool add) {                           \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i2                                                       \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" numbers "}, %" i0 ", %" i1           \
                   ", add, 1, 1;\n}\n"                                                                               \
                   : __VA_ARGS__                                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
    }                                                                                                                \
    static __device__ __forceinline__ void from_registers(float* d, const u32 (&a)[4], u64 b, bool add) {            \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i5                                                       \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" numbers "}, {%" i0 ", %" i1 ", %" i2 \
                   ", %" i3 "}, %" i4 ", add, 1, 1;\n}\n"                                                            \
                   : __VA_ARGS__                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                \
    }                                                                                                                \
  }
// Eight columns more than V has are for 16-bit operands alone: the sums of P (FwdConfig::sums_by_product).
#define TESSERA_WGMMA_16(n, numbers, i0, i1, i2, i3, i4, i5, ...)               \
  TESSERA_WGMMA(n, bf16, "bf16", numbers, i0, i1, i2, i3, i4, i5, __VA_ARGS__); \
  TESSERA_WGMMA(n, fp16, "f16", numbers, i0, i1, i2, i3, i4, i5, __VA_ARGS__)
#define TESSERA_WGMMA_OF(n, numbers, i0, i1, i2, i3, i4, i5, ...)      \
  TESSERA_WGMMA_E4M3(n, numbers, i0, i1, i2, i3, i4, i5, __VA_ARGS__); \
  TESSERA_WGMMA_16(n, numbers, i0, i1, i2, i3, i4, i5, __VA_ARGS__)

TESSERA_WGMMA_OF(32, TESSERA_N0, "16", "17", "18", "19", "20", "21", TESSERA_D16(0));
TESSERA_WGMMA_16(40, TESSERA_N0 ", %16, %17, %18, %19", "20", "21", "22", "23", "24", "25", TESSERA_D16(0),
                 TESSERA_D4(16));
TESSERA_WGMMA_OF(48, TESSERA_N0 ", %16, %17, %18, %19, %20, %21, %22, %23", "24", "25", "26", "27", "28", "29",
                 TESSERA_D16(0), TESSERA_D4(16), TESSERA_D4(20));
TESSERA_WGMMA_OF(64, TESSERA_N0 ", " TESSERA_N1, "32", "33", "34", "35", "36", "37", TESSERA_D16(0), TESSERA_D16(16));
TESSERA_WGMMA_16(72, TESSERA_N0 ", " TESSERA_N1 ", %32, %33, %34, %35", "36", "37", "38", "39", "40", "41",
                 TESSERA_D16(0), TESSERA_D16(16), TESSERA_D4(32));
TESSERA_WGMMA_OF(80, TESSERA_N0 ", " TESSERA_N1 ", %32, %33, %34, %35, %36, %37, %38, %39", "40", "41", "42", "43",
                 "44", "45", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D4(32), TESSERA_D4(36));
TESSERA_WGMMA_OF(96, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2, "48", "49", "50", "51", "52", "53", TESSERA_D16(0),
                 TESSERA_D16(16), TESSERA_D16(32));
TESSERA_WGMMA_16(104, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", %48, %49, %50, %51", "52", "53", "54", "55", "56",
                 "57", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32), TESSERA_D4(48));
TESSERA_WGMMA_OF(128, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3, "64", "65", "66", "67", "68", "69",
                 TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32), TESSERA_D16(48));
TESSERA_WGMMA_16(136, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", %64, %65, %66, %67", "68", "69",
                 "70", "71", "72", "73", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32), TESSERA_D16(48),
                 TESSERA_D4(64));
TESSERA_WGMMA_OF(160, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4, "80", "81", "82",
                 "83", "84", "85", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32), TESSERA_D16(48), TESSERA_D16(64));
TESSERA_WGMMA_OF(192, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4 ", " TESSERA_N5, "96",
                 "97", "98", "99", "100", "101", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32), TESSERA_D16(48),
                 TESSERA_D16(64), TESSERA_D16(80));
TESSERA_WGMMA_16(200,
                 TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4 ", " TESSERA_N5
                            ", %96, %97, %98, %99",
                 "100", "101", "102", "103", "104", "105", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32),
                 TESSERA_D16(48), TESSERA_D16(64), TESSERA_D16(80), TESSERA_D4(96));
TESSERA_WGMMA_OF(256,
                 TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4 ", " TESSERA_N5
                            ", " TESSERA_N6 ", " TESSERA_N7,
                 "128", "129", "130", "131", "132", "133", TESSERA_D16(0), TESSERA_D16(16), TESSERA_D16(32),
                 TESSERA_D16(48), TESSERA_D16(64), TESSERA_D16(80), TESSERA_D16(96), TESSERA_D16(112));

// int8 is used only for scores, whose operands are in shared memory.
#define TESSERA_WGMMA_INT8(n, numbers, i0, i1, i2, ...)                                                              \
  template <>                                                                                                        \
  struct Wgmma<n, Element::int8> {                                                                                   \
    static __device__ __forceinline__ void from_shared(int* d, u64 a, u64 b, bool add) {                             \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" i2                                                       \
                   ", 0;\n"                                                                                          \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" numbers "}, %" i0 ", %" i1 ", add;\n}\n" \
                   : __VA_ARGS__                                                                                     \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
    }                                                                                                                \
  }

TESSERA_WGMMA_INT8(32, TESSERA_N0, "16", "17", "18", TESSERA_I16(0));
TESSERA_WGMMA_INT8(64, TESSERA_N0 ", " TESSERA_N1, "32", "33", "34", TESSERA_I16(0), TESSERA_I16(16));
TESSERA_WGMMA_INT8(80, TESSERA_N0 ", " TESSERA_N1 ", %32, %33, %34, %35, %36, %37, %38, %39", "40", "41", "42",
                   TESSERA_I16(0), TESSERA_I16(16), TESSERA_I4(32), TESSERA_I4(36));
TESSERA_WGMMA_INT8(96, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2, "48", "49", "50", TESSERA_I16(0), TESSERA_I16(16),
                   TESSERA_I16(32));
TESSERA_WGMMA_INT8(128, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3, "64", "65", "66", TESSERA_I16(0),
                   TESSERA_I16(16), TESSERA_I16(32), TESSERA_I16(48));
TESSERA_WGMMA_INT8(160, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4, "80", "81", "82",
                   TESSERA_I16(0), TESSERA_I16(16), TESSERA_I16(32), TESSERA_I16(48), TESSERA_I16(64));
TESSERA_WGMMA_INT8(192, TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4 ", " TESSERA_N5,
                   "96", "97", "98", TESSERA_I16(0), TESSERA_I16(16), TESSERA_I16(32), TESSERA_I16(48), TESSERA_I16(64),
                   TESSERA_I16(80));
TESSERA_WGMMA_INT8(256,
                   TESSERA_N0 ", " TESSERA_N1 ", " TESSERA_N2 ", " TESSERA_N3 ", " TESSERA_N4 ", " TESSERA_N5
                              ", " TESSERA_N6 ", " TESSERA_N7,
                   "128", "129", "130", TESSERA_I16(0), TESSERA_I16(16), TESSERA_I16(32), TESSERA_I16(48),
                   TESSERA_I16(64), TESSERA_I16(80), TESSERA_I16(96), TESSERA_I16(112));

#undef TESSERA_WGMMA_INT8
#undef TESSERA_WGMMA_OF
#undef TESSERA_WGMMA_16
#undef TESSERA_WGMMA_E4M3
#undef TESSERA_WGMMA
#undef TESSERA_I16
#undef TESSERA_I4
#undef TESSERA_D16
#undef TESSERA_D4
#undef TESSERA_N0
#undef TESSERA_N1
#undef TESSERA_N2
#undef TESSERA_N3
#undef TESSERA_N4
#undef TESSERA_N5
#undef TESSERA_N6
#undef TESSERA_N7

}  // namespace tessera::cuda::ptx
