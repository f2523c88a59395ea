// SPDX-License-Identifier: Apache-2.0
// PTX ISA 9.7.9.21, cvt: two 16-bit values of a 32-bit register to fp32. A bf16 is the upper half of its fp32.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
  if constexpr (type == Element::bf16) {
    low = __uint_as_float(both << 16U);
    high = __uint_as_float(both & 0xffff0000U);
  } else {
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;}\n"
        : "=f"(low), "=f"(high)
        : "r"(both));
  }
}

}  // namespace tessera::cuda::ptx
