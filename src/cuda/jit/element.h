// SPDX-License-Identifier: Apache-2.0
// Element types of tensors, of kernels and of tensor maps.
#pragma once

#include "shared/types.h"
#include "tessera/tensor.h"

namespace tessera::cuda {

constexpr bool is_float(DType dtype) { return dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16; }

/// The Element of a DType that is_float() or has 8 bits.
constexpr Element element_of(DType dtype) {
  switch (dtype) {
    case DType::fp32:
      return Element::fp32;
    case DType::fp16:
      return Element::fp16;
    case DType::e4m3:
      return Element::e4m3;
    case DType::e5m2:
      return Element::e5m2;
    case DType::int8:
      return Element::int8;
    default:
      return Element::bf16;
  }
}

/// The word for an element type in a kernel's name.
constexpr const char* name_of(Element element) { return spelling(element).word; }

/// The driver's CUtensorMapDataType (cuda.h, CUDA 12.0): an unsigned integer of the same width, as TMA copies bits.
constexpr int tensor_map_type(Element element) {
  constexpr int kUint8 = 0;
  constexpr int kUint16 = 1;
  constexpr int kUint32 = 2;
  return bytes_of(element) == 4 ? kUint32 : bytes_of(element) == 2 ? kUint16 : kUint8;
}

}  // namespace tessera::cuda
