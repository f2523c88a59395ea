// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
void unpack(u32 both, float& low, float& high) {
  low = emulator::to_float(both & 0xffff, type == Element::bf16);
  high = emulator::to_float(both >> 16, type == Element::bf16);
}

}  // namespace tessera::cuda::ptx
