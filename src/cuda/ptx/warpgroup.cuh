// SPDX-License-Identifier: Apache-2.0
// Named barriers of some of a block's warps (PTX ISA 9.7.13.1), and setmaxnreg, which moves registers between
// warpgroups (PTX ISA 9.7.19.5).
#pragma once

#include "shared/types.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#define TESSERA_HAS_SETMAXNREG 1
#else
#define TESSERA_HAS_SETMAXNREG 0
#endif

namespace tessera::cuda::ptx {

/// Waits at barrier `id`, from 1 on (0 is __syncthreads), for `threads` threads. They are whole warps, which all reach
/// it by this same instruction.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// The same for warps that reach the barrier in different branches. bar.sync, which is barrier.sync.aligned, does not
/// allow that.
__device__ __forceinline__ void barrier_sync_of_branches(int id, int threads) {
  asm volatile("barrier.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// Arrives at the barrier without waiting.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// Sets the registers of a thread, a multiple of 8, from here on; all warps of a warpgroup call this. Targets without a
/// suffix (sm_120, for compilers that do not know sm_120f) lack the instruction: there all warps keep the registers
/// with which they began, and ptxas spills.
template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
#if TESSERA_HAS_SETMAXNREG
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(registers));
#endif
}
template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
#if TESSERA_HAS_SETMAXNREG
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(registers));
#endif
}

/// Returns x, which is the same in all lanes, in a form that shows this to ptxas. ptxas can then keep x in a uniform
/// register, as it must keep the descriptors of wgmma.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffffU, x, 0);
}

/// Returns x. Values that depend on the result are computed here, not once at an earlier place and then kept in
/// registers.
__device__ __forceinline__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Reads threadIdx.x here: ptxas does not reuse a value that was read before (PTX ISA 10.1, %tid).
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

}  // namespace tessera::cuda::ptx
