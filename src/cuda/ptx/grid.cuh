// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PTX ISA 9.7.13.13): a kernel may begin before the kernel ahead of it in the stream has
// ended. SM90 and newer; elsewhere these functions do nothing. Every block of such a kernel must wait before it
// accesses memory. It may wait as late as before it ends if the kernel ahead has waited for all that this kernel reads,
// and neither reads what the other writes.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// Waits until the kernels ahead have ended and their writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// Lets the next kernel begin once all blocks of this kernel have called this, as far as there is room for its blocks.
__device__ __forceinline__ void griddepcontrol_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_wait_and_launch() {
  griddepcontrol_wait();
  griddepcontrol_launch();
}

}  // namespace tessera::cuda::ptx
