// SPDX-License-Identifier: Apache-2.0
// Element types of tensors and of kernels.
#pragma once

#include "shared/types.h"
#include "tessera/tensor.h"

namespace tessera::cuda {

constexpr bool is_float(DType dtype) { return dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16; }

/// Of a type for which is_float holds.
constexpr Element element_of(DType dtype) {
  return dtype == DType::fp32 ? Element::fp32 : dtype == DType::fp16 ? Element::fp16 : Element::bf16;
}

/// As it is written in a kernel's source and name.
constexpr const char* name_of(Element element) {
  return element == Element::fp32 ? "fp32" : element == Element::fp16 ? "fp16" : "bf16";
}

}  // namespace tessera::cuda
