// SPDX-License-Identifier: Apache-2.0
// The part of DLPack's C ABI that a view needs (DLPack 0.x and 1.x, https://dmlc.github.io/dlpack). Names and layout of
// the structs are DLPack's, so that a DLTensor of any other library can be read here. Private to the library.
#pragma once

#include <cstdint>

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; nullptr: row-major
  std::uint64_t byte_offset;
};

static_assert(sizeof(void*) != 8 || sizeof(DLTensor) == 48);

namespace tessera::detail {

// Values of DLDeviceType and DLDataTypeCode that Tessera knows.
inline constexpr std::int32_t kDlCpu = 1;
inline constexpr std::int32_t kDlCuda = 2;
inline constexpr std::int32_t kDlCudaHost = 3;  // page-locked host memory: the CPU reads and writes it
inline constexpr std::uint8_t kDlInt = 0;
inline constexpr std::uint8_t kDlUInt = 1;
inline constexpr std::uint8_t kDlFloat = 2;
inline constexpr std::uint8_t kDlBfloat = 4;
inline constexpr std::uint8_t kDlFloat8E4m3fn = 10;  // since DLPack 1.1
inline constexpr std::uint8_t kDlFloat8E5m2 = 12;    // since DLPack 1.1

}  // namespace tessera::detail
