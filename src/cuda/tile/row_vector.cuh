// SPDX-License-Identifier: Apache-2.0
// A few adjacent elements of a row in global memory, as fp32 in registers.
#pragma once

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

template <Element type, int width>
struct RowVector {
  static_assert(width == 1 || width == 4 || width == 8);
  float at[width];

  /// `from` is aligned to the bytes of all elements, or to 16 bytes if these are more.
  __device__ __forceinline__ void load(const void* from) {
    if constexpr (type == Element::fp32) {
      if constexpr (width > 1) {
#pragma unroll
        for (int i = 0; i < width; i += 4) {
          const float4 four = static_cast<const float4*>(from)[i / 4];
          at[i] = four.x, at[i + 1] = four.y, at[i + 2] = four.z, at[i + 3] = four.w;
        }
      } else {
        at[0] = *static_cast<const float*>(from);
      }
    } else if constexpr (width == 8) {
      const uint4 four = *static_cast<const uint4*>(from);
      ptx::unpack<type>(four.x, at[0], at[1]);
      ptx::unpack<type>(four.y, at[2], at[3]);
      ptx::unpack<type>(four.z, at[4], at[5]);
      ptx::unpack<type>(four.w, at[6], at[7]);
    } else if constexpr (width == 4) {
      const uint2 two = *static_cast<const uint2*>(from);
      ptx::unpack<type>(two.x, at[0], at[1]);
      ptx::unpack<type>(two.y, at[2], at[3]);
    } else {
      float unused;
      ptx::unpack<type>(*static_cast<const unsigned short*>(from), at[0], unused);
    }
  }

  __device__ __forceinline__ void store(void* to) const {
    static_assert(width != 4);
    if constexpr (type == Element::fp32) {
      if constexpr (width == 8) {
        auto* two = static_cast<float4*>(to);
        two[0] = make_float4(at[0], at[1], at[2], at[3]);
        two[1] = make_float4(at[4], at[5], at[6], at[7]);
      } else {
        *static_cast<float*>(to) = at[0];
      }
    } else if constexpr (width == 8) {
      *static_cast<uint4*>(to) = make_uint4(ptx::pack<type>(at[0], at[1]), ptx::pack<type>(at[2], at[3]),
                                            ptx::pack<type>(at[4], at[5]), ptx::pack<type>(at[6], at[7]));
    } else {
      *static_cast<unsigned short*>(to) = static_cast<unsigned short>(ptx::pack<type>(at[0], 0.0F));
    }
  }
};

/// Copies the bits of elements, for copies without arithmetic: a NaN keeps its payload.
template <Element type, int width>
__device__ __forceinline__ void copy_elements(const void* from, void* to) {
  if constexpr (has_eight_bits(type)) {
    if constexpr (width == 8) {
      *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    } else {
      *static_cast<unsigned char*>(to) = *static_cast<const unsigned char*>(from);
    }
  } else if constexpr (width == 8) {
    static_cast<uint4*>(to)[0] = static_cast<const uint4*>(from)[0];
    if constexpr (type == Element::fp32) static_cast<uint4*>(to)[1] = static_cast<const uint4*>(from)[1];
  } else if constexpr (type == Element::fp32) {
    *static_cast<u32*>(to) = *static_cast<const u32*>(from);
  } else {
    *static_cast<unsigned short*>(to) = *static_cast<const unsigned short*>(from);
  }
}

}  // namespace tessera::cuda
