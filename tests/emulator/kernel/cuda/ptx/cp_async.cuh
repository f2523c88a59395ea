// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

inline u32 shared_address(const void* pointer) { return emulator::shared_address(pointer); }
inline void cp_async_16(u32 to, const void* from, Place at = {}) { emulator::cp_async(to, from, 16, true, at); }
inline void cp_async_16_or_zeros(u32 to, const void* from, bool valid, Place at = {}) {
  emulator::cp_async(to, from, 16, valid, at);
}
inline void cp_async_4_or_zeros(u32 to, const void* from, bool valid, Place at = {}) {
  emulator::cp_async(to, from, 4, valid, at);
}
inline void cp_async_commit() { emulator::cp_async_commit(); }
template <int pending>
void cp_async_wait() {
  emulator::cp_async_wait(pending);
}

}  // namespace tessera::cuda::ptx
