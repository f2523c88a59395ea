// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shared/types.h"

namespace tessera::cuda::ptx {

template <Element type>
void unpack(u32 both, float& low, float& high) {
  low = emulator::to_float(both & 0xffff, type == Element::bf16);
  high = emulator::to_float(both >> 16, type == Element::bf16);
}

inline u32 byte_of(float x, int digits, int least_exponent, int bias, float largest, u32 nan) {
  const u32 sign = __float_as_uint(x) >> 31 << 7;
  if (x != x) return sign | nan;
  const float magnitude = fminf(fabsf(x), largest);
  int exponent = static_cast<int>(__float_as_uint(magnitude) >> 23) - 127;
  if (exponent < least_exponent) exponent = least_exponent;
  const double step = __builtin_ldexp(1.0, exponent - digits);
  const auto steps = static_cast<u32>(nearbyint(magnitude / step));  // 2^digits is the exponent's 1
  return sign | (steps + (static_cast<u32>(exponent + bias - 1) << digits));
}

template <Element type>
u32 pack_bytes(float low, float high) {
  const auto byte = [](float x) {
    return type == Element::e4m3 ? byte_of(x, 3, -6, 7, 448.0F, 0x7F) : byte_of(x, 2, -14, 15, 57344.0F, 0x7F);
  };
  return byte(low) | byte(high) << 8;
}

inline u32 pack_e4m3(float a, float b, float c, float d) {
  return pack_bytes<Element::e4m3>(a, b) | pack_bytes<Element::e4m3>(c, d) << 16;
}

template <Element type>
u32 unpack_bytes(u32 bytes) {
  const auto half_of = [](u32 byte) {
    if (type != Element::e4m3) return byte << 8;
    const int exponent = static_cast<int>(byte >> 3 & 0xF);
    const auto digits = static_cast<float>((byte & 7) + (exponent > 0 ? 8 : 0));
    const float magnitude = __builtin_ldexpf(digits, (exponent > 0 ? exponent : 1) - 10);
    const u32 half = (byte & 0x7F) == 0x7F ? 0x7FFF : emulator::from_double(magnitude, false);
    return half | (byte & 0x80) << 8;
  };
  return half_of(bytes & 0xFF) | half_of(bytes >> 8 & 0xFF) << 16;
}

}  // namespace tessera::cuda::ptx
