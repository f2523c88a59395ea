// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.13.1 and 9.7.19.5: barriers of some of a block's warps, and registers that a warpgroup gives or takes.
#pragma once

#include "shared/types.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#define TESSERA_HAS_SETMAXNREG 1
#else
#define TESSERA_HAS_SETMAXNREG 0
#endif

namespace tessera::cuda::ptx {

/// Barrier `id` from 1 on (0 is __syncthreads) of `threads` threads, whole warps, which all wait at this one place.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// The same for warps of several kinds, each with a place of its own: bar.sync is barrier.sync.aligned.
__device__ __forceinline__ void barrier_sync_of_branches(int id, int threads) {
  asm volatile("barrier.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// Counts this thread at the barrier and goes on.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

/// Registers a thread from here on, a multiple of 8; all warps of a warpgroup. Plain forms of an architecture (sm_120,
/// for compilers that know no sm_120f) lack the instruction: there all keep what they began with, and the compiler
/// spills.
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

/// A value that is the same in all lanes, said so that it may lie in a uniform register, as what descriptors of
/// products are made of must.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffffU, x, 0);
}

/// x itself. What follows from it is computed where this stands, instead of once and then kept where registers are
/// short.
__device__ __forceinline__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// threadIdx.x, which is read where this stands: the assembler uses no copy from before (PTX ISA 10.1, %tid).
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
  return index;
}

}  // namespace tessera::cuda::ptx
