// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// Bytes of an element of a CUtensorMapDataType: unsigned integers of 8, 16 and 32 bits.
inline std::uint32_t bytes_of_map_type(int type) { return 1U << static_cast<unsigned>(type); }

/// What cuTensorMapEncodeTiled answers by the driver's documentation: 0, or 1 for an invalid value.
inline int check_tensor_map(const void* map, int type, std::uint32_t rank, const void* address,
                            const std::uint64_t* sizes, const std::uint64_t* strides, const std::uint32_t* box,
                            int swizzle) {
  constexpr int kInvalidValue = 1;
  if (type < 0 || type > 2) return kInvalidValue;
  if (rank < 4 || rank > 5 || address == nullptr || reinterpret_cast<std::uintptr_t>(address) % 16 != 0)
    return kInvalidValue;
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) return kInvalidValue;
  for (std::uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256) return kInvalidValue;
    constexpr std::uint64_t kMostStride = std::uint64_t{1} << 40;
    const std::uint64_t stride = i > 0 ? strides[i - 1] : 16;
    if (stride == 0 || stride % 16 != 0 || stride >= kMostStride) return kInvalidValue;
  }
  return box[0] * bytes_of_map_type(type) > (swizzle == 3 ? 128U : 64U) ? kInvalidValue : 0;
}
