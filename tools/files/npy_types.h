// SPDX-License-Identifier: Apache-2.0
// Element types of .npy files: what is read, and first of each dtype what is written.
#pragma once

#include <array>
#include <string_view>

#include "tessera/tensor.h"

namespace tessera::files {

inline constexpr std::string_view kNpyMagic{"\x93NUMPY", 6};

struct NpyType {
  std::string_view descr;
  DType dtype;
};
inline constexpr std::array<NpyType, 18> kNpyTypes{{{"<f4", DType::fp32},
                                                    {"<f2", DType::fp16},
                                                    {"<f8", DType::fp64},
                                                    {"<V2", DType::bf16},
                                                    {"<i4", DType::int32},
                                                    {"<i8", DType::int64},
                                                    {"<u4", DType::uint32},
                                                    {"<u8", DType::uint64},
                                                    {"|u1", DType::uint8},
                                                    {"|i1", DType::int8},
                                                    {"<u1", DType::uint8},
                                                    {"<i1", DType::int8},
                                                    {"|V2", DType::bf16},
                                                    {"V2", DType::bf16},
                                                    {"bfloat16", DType::bf16},
                                                    {"f4", DType::fp32},
                                                    {"f2", DType::fp16},
                                                    {"f8", DType::fp64}}};

}  // namespace tessera::files
