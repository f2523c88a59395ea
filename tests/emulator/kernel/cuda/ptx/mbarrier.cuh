// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals, Place at = {}) { emulator::mbarrier_init(barrier, arrivals, at); }
inline void fence_mbarrier_init() {}
inline void fence_async_proxy() {}
inline void mbarrier_arrive(u32 barrier, Place at = {}) { emulator::mbarrier_arrive(barrier, 0, at); }
inline void mbarrier_arrive_expecting(u32 barrier, u32 bytes, Place at = {}) {
  emulator::mbarrier_arrive(barrier, bytes, at);
}
inline void mbarrier_wait(u32 barrier, u32 parity, Place at = {}) { emulator::mbarrier_wait(barrier, parity, at); }

inline bool mbarrier_test(u32 barrier, u32 parity, Place at = {}) {
  return emulator::mbarrier_test(barrier, parity, at);
}

}  // namespace tessera::cuda::ptx
