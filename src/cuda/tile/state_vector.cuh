// SPDX-License-Identifier: Apache-2.0
// 16 bytes of a state of linear attention: in memory in the type of the state, in registers as fp32.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/tile/philox.cuh"
#include "shared/params.h"

namespace tessera::cuda {

template <Element type>
struct StateVector {
  static constexpr int kWidth = 16 / bytes_of(type);
  float at[kWidth];

  __device__ __forceinline__ void widen(const u32 (&bits)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (type == Element::fp32) {
        at[i] = __uint_as_float(bits[i]);
      } else {
        ptx::unpack<type>(bits[i], at[2 * i], at[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(void* to) const {
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (type == Element::fp32) {
        bits[i] = __float_as_uint(at[i]);
      } else {
        bits[i] = ptx::pack<type>(at[2 * i], at[2 * i + 1]);
      }
    }
    ptx::store_once_16(to, bits);
  }

  /// Stores bf16 with stochastic rounding: 16 random bits are added to the 16 bits that are cut off.
  __device__ __forceinline__ void store(void* to, const Philox& draws) const {
    static_assert(type == Element::bf16);
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = rounded(at[2 * i], draws.word[i] & 0xffffU) | rounded(at[2 * i + 1], draws.word[i] >> 16) << 16;
    }
    ptx::store_once_16(to, bits);
  }
  static __device__ __forceinline__ u32 rounded(float value, u32 draw) {
    const u32 bits = __float_as_uint(value);
    return value != value ? bits >> 16 | 0x40U : (bits + draw) >> 16;
  }
};

}  // namespace tessera::cuda
