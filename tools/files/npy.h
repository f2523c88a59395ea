// SPDX-License-Identifier: Apache-2.0
// NumPy's .npy format, versions 1 to 3, as its specification (NEP 1) describes it: little-endian, row-major.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/array.h"

namespace tessera::files {

struct NpyHeader {
  DType dtype = DType::fp32;
  std::vector<std::int64_t> shape;
  std::size_t data_offset = 0;  // bytes from the start of the file
};

/// Types: f2, f4, f8, i1, i4, i8, u1, u4, u8, and bf16 as a 2-byte void ('<V2', what ml_dtypes stores).
/// `name` is the file's name in errors. Throws Error{parse} for anything that is not exactly such a file: a foreign
/// magic, a version, a type, column-major order of a matrix, data that are shorter or longer than the shape says.
NpyHeader parse_npy_header(std::span<const std::byte> file, std::string_view name);
/// Copies the data.
Array parse_npy(std::span<const std::byte> file, std::string_view name);
Array read_npy(const std::string& path);

/// Writes version 1.0 (2.0 never needed: at most six dimensions). The tensor must be contiguous and on the CPU.
void write_npy(const std::string& path, const Tensor& tensor);

}  // namespace tessera::files
