// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "files/bytes.h"
#include "files/safetensors.h"
#include "files/safetensors_types.h"
#include "tessera/error.h"

namespace tessera::files {
namespace {

std::string_view name_of(DType dtype, const std::string& path) {
  for (const SafetensorsType& type : kSafetensorsTypes) {
    if (type.dtype == dtype) return type.name;
  }
  throw Error(ErrorCode::unsupported, path, "dtype " + std::string(to_string(dtype)),
              "a type that .safetensors can hold");
}

}  // namespace

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wider elements first, so that every tensor begins at a multiple of its element size.
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& each : tensors) order.push_back(&each);
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::vector<std::span<const std::byte>> parts(2);
  std::size_t offset = 0;
  for (const NamedTensor* each : order) {
    const Tensor& tensor = each->tensor;
    if (!tensor || tensor.device.type != DeviceType::cpu || !tensor.is_contiguous() || header.contains(each->name)) {
      throw Error(ErrorCode::invalid_argument, path, "tensor '" + each->name + "'",
                  "contiguous tensors on the CPU, each name once");
    }
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype);
    header[each->name] = {
        {"dtype", name_of(tensor.dtype, path)},
        {"shape", std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.begin() + tensor.rank)},
        {"data_offsets", {offset, offset + bytes}}};
    if (bytes != 0) parts.emplace_back(tensor.bytes(), bytes);
    offset += bytes;
  }
  std::string text = header.dump();
  while (text.size() % 8 != 0) text += ' ';
  std::array<std::byte, 8> length{};
  for (std::size_t at = 0; at < 8; ++at) length[at] = static_cast<std::byte>(text.size() >> (8 * at) & 0xFFU);
  parts[0] = length;
  parts[1] = std::as_bytes(std::span(text.data(), text.size()));
  write_atomically(path, parts);
}

}  // namespace tessera::files
