// SPDX-License-Identifier: Apache-2.0
// Elements of extra tensors for host functions.
#include <algorithm>
#include <limits>

#include "base/half.h"
#include "tessera/callable.h"

namespace tessera {

double Extras::element(const Tensor& tensor, const std::int64_t* at, int rank) noexcept {
  std::int64_t offset = 0;
  for (int i = 0; i < std::min(rank, tensor.rank); ++i) {
    const auto d = static_cast<std::size_t>(i);
    offset += std::clamp<std::int64_t>(at[i], 0, tensor.shape[d] - 1) * tensor.strides[d];
  }
  switch (tensor.dtype) {
    case DType::fp32:
      return static_cast<double>(tensor.as<float>()[offset]);
    case DType::fp16:
      return static_cast<double>(detail::from_fp16(tensor.as<std::uint16_t>()[offset]));
    case DType::bf16:
      return static_cast<double>(detail::from_bf16(tensor.as<std::uint16_t>()[offset]));
    case DType::int32:
      return tensor.as<std::int32_t>()[offset];
    case DType::int64:
      return static_cast<double>(tensor.as<std::int64_t>()[offset]);
    case DType::uint8:
      return tensor.as<std::uint8_t>()[offset];
    default:
      return std::numeric_limits<double>::quiet_NaN();  // no extra tensor has such a type
  }
}

}  // namespace tessera
