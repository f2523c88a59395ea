// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at = {}) {
  emulator::mma_m16n8k16(c, a, b0, b1, type == Element::bf16, at);
}

inline void mma_m16n8k32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at = {}) {
  emulator::mma_m16n8k32_e4m3(c, a, b0, b1, at);
}

inline void mma_m16n8k32_int8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at = {}) {
  emulator::mma_m16n8k32_int8(c, a, b0, b1, at);
}

}  // namespace tessera::cuda::ptx
