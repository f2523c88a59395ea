// SPDX-License-Identifier: Apache-2.0
#include "files/bytes.h"
#include "files/npy.h"
#include "files/npy_types.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

std::string_view descr_of(DType dtype, const std::string& path) {
  for (const NpyType& type : kNpyTypes) {
    if (type.dtype == dtype) return type.descr;
  }
  throw Error(ErrorCode::unsupported, path, "dtype " + std::string(to_string(dtype)), "a type that .npy can hold");
}

}  // namespace

void write_npy(const std::string& path, const Tensor& tensor) {
  if (!tensor || tensor.device.type != DeviceType::cpu || !tensor.is_contiguous()) {
    throw Error(ErrorCode::invalid_argument, path, tensor ? tensor.describe() : "no tensor",
                "a contiguous tensor on the CPU");
  }
  std::string header =
      "{'descr': '" + std::string(descr_of(tensor.dtype, path)) + "', 'fortran_order': False, 'shape': (";
  for (int axis = 0; axis < tensor.rank; ++axis) {
    header += std::to_string(tensor.shape[static_cast<std::size_t>(axis)]) + (axis + 1 < tensor.rank ? ", " : "");
  }
  header += tensor.rank == 1 ? ",), }" : "), }";
  constexpr std::size_t kPrefix = 10;                             // magic, version, length
  while ((kPrefix + header.size() + 1) % 64 != 0) header += ' ';  // the data begin at a multiple of 64 bytes
  header += '\n';
  std::string prefix(kNpyMagic);
  prefix += {'\x01', '\x00', static_cast<char>(header.size() & 0xFFU), static_cast<char>(header.size() >> 8U)};
  const auto size = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype);
  write_atomically(path, {std::as_bytes(std::span(prefix.data(), prefix.size())),
                          std::as_bytes(std::span(header.data(), header.size())),
                          std::span<const std::byte>(size == 0 ? nullptr : tensor.bytes(), size)});
}

}  // namespace tessera::files
