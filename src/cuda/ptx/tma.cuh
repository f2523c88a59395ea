// SPDX-License-Identifier: Apache-2.0
// Bulk copies by the TMA (PTX ISA 9.7.9.25 and 9.7.9.27); SM90 and newer. Elements outside of the tensor become zeros.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

// Architectures without clusters take the destination as .shared::cta. From .shared::cluster their ptxas makes a
// function call, which needs local memory and prevents setmaxnreg.
#if __CUDA_ARCH__ >= 1200
#define TESSERA_TMA_TO "shared::cta"
#else
#define TESSERA_TMA_TO "shared::cluster"
#endif

/// Loads one box of a 4-dimensional tensor, at (column, head, row, batch); `barrier` counts its bytes. By one thread.
__device__ __forceinline__ void tma_load(u32 to, const void* tensor_map, u32 barrier, int column, int head, int row,
                                         int batch) {
  asm volatile("cp.async.bulk.tensor.4d." TESSERA_TMA_TO
               ".global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
               "l"(tensor_map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch)
               : "memory");
}
/// The same for a 5-dimensional tensor, at (0, 0, panel, eight, page); `eight` is the index of eight rows.
__device__ __forceinline__ void tma_load_rows(u32 to, const void* tensor_map, u32 barrier, int panel, int eight,
                                              int page) {
  asm volatile("cp.async.bulk.tensor.5d." TESSERA_TMA_TO
               ".global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4, %5, %6}], [%2];\n" ::"r"(to),
               "l"(tensor_map), "r"(barrier), "r"(0), "r"(panel), "r"(eight), "r"(page)
               : "memory");
}

#undef TESSERA_TMA_TO

/// Adds `bytes` of fp32 in shared memory to those in global memory, both 16-byte aligned. Its order among other
/// additions is undefined. By one thread, which must commit it.
__device__ __forceinline__ void tma_add(float* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
/// Copies `bytes` of shared memory to global memory, both 16-byte aligned. By one thread, which must commit it.
__device__ __forceinline__ void tma_store(float* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
/// Waits until the operations that the thread has committed have read their shared memory.
__device__ __forceinline__ void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory"); }
/// Waits until the operations that the thread has committed are complete.
__device__ __forceinline__ void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }

}  // namespace tessera::cuda::ptx
