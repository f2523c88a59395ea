// SPDX-License-Identifier: Apache-2.0
// A number that the compiler cannot see through: what it computes from one stays where it is written.
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace tessera::cuda::ptx
