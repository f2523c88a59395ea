// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .npy file: either an Error, or an array that holds exactly the file's data.
#include "files/npy.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tessera/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  try {
    const files::NpyHeader header = files::parse_npy_header(file, "fuzz");
    const files::Array array = files::parse_npy(file, "fuzz");
    if (header.data_offset + array.size_bytes() != size) std::abort();
    if (std::memcmp(array.data(), data + header.data_offset, array.size_bytes()) != 0) std::abort();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::parse && error.code() != ErrorCode::overflow) std::abort();
  }
  return 0;
}
