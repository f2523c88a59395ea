// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.27: boxes of a tensor by TMA; SM90 and newer. What lies outside of the tensor becomes
// zeros.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

// Chips without clusters take the destination as the block's own; of .shared::cluster their assembler makes a call,
// which keeps registers from being shared out anew and needs local memory.
#if __CUDA_ARCH__ >= 1200
#define TESSERA_TMA_TO "shared::cta"
#else
#define TESSERA_TMA_TO "shared::cluster"
#endif

/// One box of a 4-dimensional tensor at (column, head, row, batch); its bytes count at `barrier`. One thread.
__device__ __forceinline__ void tma_load(u32 to, const void* tensor_map, u32 barrier, int column, int head, int row,
                                         int batch) {
  asm volatile("cp.async.bulk.tensor.4d." TESSERA_TMA_TO
               ".global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
               "l"(tensor_map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch)
               : "memory");
}

#undef TESSERA_TMA_TO

}  // namespace tessera::cuda::ptx
