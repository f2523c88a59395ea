// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.25: asynchronous copies from global to shared memory, SM80 and newer.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

/// 32-bit address of an object in shared memory.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes; they bypass L1.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}

/// The same; with valid = false nothing is read and zeros are written.
__device__ __forceinline__ void cp_async_16_or_zeros(u32 to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/// The same for 4 bytes, which go through L1.
__device__ __forceinline__ void cp_async_4_or_zeros(u32 to, const void* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most the `pending` groups that this thread has committed last are in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

}  // namespace tessera::cuda::ptx
