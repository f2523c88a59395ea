// SPDX-License-Identifier: Apache-2.0
// mbarriers (PTX ISA 9.7.13.15): barriers in shared memory that count arrivals and bytes of asynchronous copies; SM90
// and newer. A phase ends when all its arrivals and bytes have come. A wait names the parity of its phase, 0 for the
// first. So it passes at once, wrongly, if the phase before its own has not ended: a thread must know that it has
// before it waits. The end of a copy into another stage does not prove that, because copies complete in any order.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

/// Orders this thread's accesses to shared memory before those of the async proxy (TMA, wgmma) that follow a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

/// Arrives, and adds `bytes` to those for which the phase waits.
__device__ __forceinline__ void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Returns whether the phase has ended, without waiting.
__device__ __forceinline__ bool mbarrier_test(u32 barrier, u32 parity) {
  u32 ended;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

}  // namespace tessera::cuda::ptx
