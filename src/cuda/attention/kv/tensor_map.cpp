// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/kv/tensor_map.h"

#include <algorithm>
#include <array>
#include <string>

#include "cuda/driver/driver.h"
#include "tessera/error.h"

namespace tessera::cuda {
namespace {

// Values of the driver's enumerations (cuda.h, CUDA 12.0).
constexpr int kUint16 = 1;  // bits are bits
constexpr int kNoInterleave = 0;
constexpr int kSwizzle64 = 2;
constexpr int kSwizzle128 = 3;
constexpr int kPromote256 = 3;  // a miss brings 256 bytes to L2
constexpr int kFillZeros = 0;

// A dimension of one element has a stride that nobody uses, and a broadcast one has 0; the driver wants multiples of 16
// bytes above 0, and kernels ask for element 0 of such dimensions.
std::uint64_t stride_bytes(i64 stride, std::int64_t size) {
  return stride > 0 && size > 1 ? static_cast<std::uint64_t>(stride) * 2 : 16;
}
std::uint64_t extent(i64 stride, std::int64_t size) {
  return static_cast<std::uint64_t>(stride == 0 ? 1 : std::max<std::int64_t>(size, 1));
}

}  // namespace

TensorMap tensor_map(const void* tensor, const Strides& strides, const MapSizes& tensor_sizes, const MapBox& box_of) {
  const auto encode = driver().tensor_map_encode_tiled;
  if (encode == nullptr) throw Error(ErrorCode::unsupported, "driver", "one without tensor maps", "CUDA 12 or newer");
  const auto [columns, heads, rows, batch] = tensor_sizes;
  const std::array<std::uint64_t, 4> sizes = {static_cast<std::uint64_t>(columns), extent(strides.head, heads),
                                              static_cast<std::uint64_t>(std::max<std::int64_t>(rows, 1)),
                                              extent(strides.batch, batch)};
  const std::array<std::uint64_t, 3> steps = {stride_bytes(strides.head, heads), stride_bytes(strides.row, rows),
                                              stride_bytes(strides.batch, batch)};
  const std::array<std::uint32_t, 4> box = {static_cast<std::uint32_t>(box_of.columns),
                                            static_cast<std::uint32_t>(box_of.heads),
                                            static_cast<std::uint32_t>(box_of.rows), 1};
  const std::array<std::uint32_t, 4> every = {1, 1, 1, 1};
  TensorMap map{};
  check(encode(&map, kUint16, 4, const_cast<void*>(tensor), sizes.data(), steps.data(), box.data(), every.data(),
               kNoInterleave, box_of.columns == 64 ? kSwizzle128 : kSwizzle64, kPromote256, kFillZeros),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace tessera::cuda
