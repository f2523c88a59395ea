// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernel/calls.h"

namespace emulator {

/// What the driver writes into a CUtensorMap.
struct TensorMap {
  static constexpr std::uint64_t kMark = 0x70616d5f726f736e;
  std::uint64_t mark = 0;
  const char* address = nullptr;
  std::uint64_t sizes[5] = {};
  std::uint64_t strides[4] = {};  // in bytes, from the second dimension on
  std::uint32_t box[5] = {};
  std::uint8_t rank = 4;
  std::uint8_t element = 2;  // bytes
};
static_assert(sizeof(TensorMap) <= 128);

/// Where TMA and wgmma have what a tile of plain rows has at an address: chunks of 16 bytes exchanged by the row's
/// number, which is to be seen in the address.
inline u32 swizzled(u32 address, u32 row_bytes) { return address ^ (address >> 7 & (row_bytes == 128 ? 7U : 3U)) << 4; }

}  // namespace emulator
