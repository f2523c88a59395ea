// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.13.13: kernels that begin before the one in front of them has ended (programmatic dependent launch); SM90
// and newer, elsewhere nothing. A kernel that is launched so must wait in every block: before it touches memory, or,
// where the kernel in front has waited for all that it reads, and neither reads what the other writes, before it ends.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// Until the kernels in front have ended and what they wrote is here.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// The kernel behind may begin, as far as there is room for its blocks beside all of this kernel's.
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
