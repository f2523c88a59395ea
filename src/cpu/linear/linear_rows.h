// SPDX-License-Identifier: Apache-2.0
// What steps of linear attention with and without a ring share: the addresses of rows, and their greatest length.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/tensor.h"

namespace tessera::cpu {

inline constexpr std::int64_t kLongestStateRow = 512;  // Problem::check's limit of the head dims

/// Address of row [i0][i1][i2] of a tensor of rank 4.
inline std::byte* row_at(const Tensor& tensor, std::int64_t i0, std::int64_t i1, std::int64_t i2) {
  return tensor.bytes() + (i0 * tensor.strides[0] + i1 * tensor.strides[1] + i2 * tensor.strides[2]) *
                              static_cast<std::int64_t>(size_of(tensor.dtype));
}

}  // namespace tessera::cpu
