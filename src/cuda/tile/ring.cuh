// SPDX-License-Identifier: Apache-2.0
// A ring of buffers in shared memory. Producers (the TMA or threads) fill the buffers, and warps of the block, the
// consumers, read them. Each buffer has two mbarriers: `full` counts the bytes of copies or the threads that have
// filled the buffer, and every consumer warp arrives at `empty` when it has read the buffer. Uses are numbered from 0;
// use i is one of buffer i % stages.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace tessera::cuda {

template <int stages>
struct Ring {
  static constexpr int bytes = stages * 16;
  u32 barriers;  // address in shared memory: full and empty of every buffer

  __device__ __forceinline__ u32 full(int use) const { return barriers + static_cast<u32>(use) % stages * 16; }
  __device__ __forceinline__ u32 empty(int use) const { return full(use) + 8; }
  static __device__ __forceinline__ u32 parity(int use) { return static_cast<u32>(use) / stages & 1; }

  /// One thread calls this, before a barrier of the block. `fillers`: the number of threads that fill a buffer;
  /// `warps`: the number of consumer warps.
  __device__ __forceinline__ void init(int fillers, int warps) const {
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) {
      ptx::mbarrier_init(full(stage), static_cast<u32>(fillers));
      ptx::mbarrier_init(empty(stage), static_cast<u32>(warps));
    }
  }
  /// Waits until all warps have read the previous use of the buffer (the first uses do not wait), and makes full(use)
  /// expect `size` bytes. The thread that issues the copies calls this before them.
  __device__ __forceinline__ void acquire(int use, u32 size) const {
    wait_empty(use);
    ptx::mbarrier_arrive_expecting(full(use), size);
  }
  /// For threads that fill a buffer themselves: wait_empty() waits until all warps have read the previous use of the
  /// buffer, and publish() says that this thread's part of it is written.
  __device__ __forceinline__ void wait_empty(int use) const {
    if (use >= stages) ptx::mbarrier_wait(empty(use), parity(use) ^ 1);
  }
  __device__ __forceinline__ void publish(int use) const { ptx::mbarrier_arrive(full(use)); }
  /// Consumers: waits until the buffer is filled.
  __device__ __forceinline__ void wait(int use) const { ptx::mbarrier_wait(full(use), parity(use)); }
  /// Consumers: whether the buffer is filled.
  __device__ __forceinline__ bool test(int use) const { return ptx::mbarrier_test(full(use), parity(use)); }
  /// Consumers: one lane of each warp calls this when all lanes have read the buffer.
  __device__ __forceinline__ void release(int use) const { ptx::mbarrier_arrive(empty(use)); }
};

}  // namespace tessera::cuda
