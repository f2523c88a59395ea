// SPDX-License-Identifier: Apache-2.0
// Any bytes as a .safetensors file: either an Error, or tensors that together are exactly the file's data.
#include "files/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tessera/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  files::SafetensorsHeader header;
  try {
    header = files::parse_safetensors_header(file, "fuzz");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::parse && error.code() != ErrorCode::overflow) std::abort();
    return 0;
  }
  std::size_t covered = 0;
  for (const files::SafetensorsEntry& entry : header.entries) {
    covered += entry.end - entry.begin;
    if (header.find(entry.name) == nullptr) std::abort();
    try {
      const files::Array array = files::copy_tensor(file, header, entry, "fuzz");
      if (array.size_bytes() != entry.end - entry.begin) std::abort();
      if (std::memcmp(array.data(), data + header.data_offset + entry.begin, array.size_bytes()) != 0) std::abort();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::invalid_argument) std::abort();
    }
  }
  if (header.data_offset + covered != size) std::abort();
  return 0;
}
