// SPDX-License-Identifier: Apache-2.0
// Element types of .safetensors files.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "tessera/tensor.h"

namespace tessera::files {

struct SafetensorsType {
  std::string_view name;
  std::size_t bytes;
  std::optional<DType> dtype;
};
inline constexpr std::array<SafetensorsType, 15> kSafetensorsTypes{{{"F64", 8, DType::fp64},
                                                                    {"F32", 4, DType::fp32},
                                                                    {"F16", 2, DType::fp16},
                                                                    {"BF16", 2, DType::bf16},
                                                                    {"F8_E4M3", 1, DType::e4m3},
                                                                    {"F8_E5M2", 1, DType::e5m2},
                                                                    {"I8", 1, DType::int8},
                                                                    {"I32", 4, DType::int32},
                                                                    {"I64", 8, DType::int64},
                                                                    {"U8", 1, DType::uint8},
                                                                    {"U32", 4, DType::uint32},
                                                                    {"U64", 8, DType::uint64},
                                                                    {"BOOL", 1, std::nullopt},
                                                                    {"I16", 2, std::nullopt},
                                                                    {"U16", 2, std::nullopt}}};

}  // namespace tessera::files
