// SPDX-License-Identifier: Apache-2.0
// A ring of buffers that TMA, or threads, fill and warps of a block read. Each buffer has two barriers:
// `full`, which counts the copy's bytes or the threads that have filled it, and `empty`, at which every warp arrives
// when it has read. Uses are numbered from 0; use i is of buffer i % stages.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace tessera::cuda {

template <int stages>
struct Ring {
  static constexpr int bytes = stages * 16;
  u32 barriers;  // shared memory: full, empty of every buffer

  __device__ __forceinline__ u32 full(int use) const { return barriers + static_cast<u32>(use) % stages * 16; }
  __device__ __forceinline__ u32 empty(int use) const { return full(use) + 8; }
  static __device__ __forceinline__ u32 parity(int use) { return static_cast<u32>(use) / stages & 1; }

  /// By one thread, before a barrier of the block. `fillers`: threads that fill a buffer; `warps`: that read it.
  __device__ __forceinline__ void init(int fillers, int warps) const {
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) {
      ptx::mbarrier_init(full(stage), static_cast<u32>(fillers));
      ptx::mbarrier_init(empty(stage), static_cast<u32>(warps));
    }
  }
  /// The copying thread waits until all have read the buffer's use before this one (the first uses do not wait). Then
  /// it issues copies of `size` bytes, which complete on barrier full(use).
  __device__ __forceinline__ void acquire(int use, u32 size) const {
    wait_empty(use);
    ptx::mbarrier_arrive_expecting(full(use), size);
  }
  /// Threads that fill a buffer themselves: until it has been read by all; then that their part is there.
  __device__ __forceinline__ void wait_empty(int use) const {
    if (use >= stages) ptx::mbarrier_wait(empty(use), parity(use) ^ 1);
  }
  __device__ __forceinline__ void publish(int use) const { ptx::mbarrier_arrive(full(use)); }
  /// Readers: until the copy is there.
  __device__ __forceinline__ void wait(int use) const { ptx::mbarrier_wait(full(use), parity(use)); }
  /// Readers: whether it is.
  __device__ __forceinline__ bool test(int use) const { return ptx::mbarrier_test(full(use), parity(use)); }
  /// One lane of each warp, when all have read.
  __device__ __forceinline__ void release(int use) const { ptx::mbarrier_arrive(empty(use)); }
};

}  // namespace tessera::cuda
