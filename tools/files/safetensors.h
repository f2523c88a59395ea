// SPDX-License-Identifier: Apache-2.0
// The .safetensors format: 8 bytes of header length, a JSON header, then the data, without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "files/array.h"
#include "files/bytes.h"

namespace tessera::files {

struct SafetensorsEntry {
  std::string name;
  std::string type;            // as in the file: "BF16"
  std::optional<DType> dtype;  // nullopt: a type of the format that Tessera does not have (BOOL, I16, U16)
  std::vector<std::int64_t> shape;
  std::size_t begin = 0;  // bytes from the start of the data
  std::size_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
  std::size_t data_offset = 0;  // bytes from the start of the file

  /// nullptr when there is no such tensor.
  [[nodiscard]] const SafetensorsEntry* find(std::string_view name) const noexcept;
};

/// Throws Error{parse} naming the file (`name`) and the tensor for anything out of order: a header longer than the file
/// or 100 MB, JSON that is deeper than the format, a key twice, an unknown type, offsets out of range, overlapping,
/// with gaps or of another size than the shape; Error{overflow} for a shape whose bytes do not fit.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file, std::string_view name);
/// Copies the data of one tensor. Throws Error{unsupported} when its type or rank is none of Tessera's.
Array copy_tensor(std::span<const std::byte> file, const SafetensorsHeader& header, const SafetensorsEntry& entry,
                  std::string_view name);

/// An open file.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  [[nodiscard]] const SafetensorsHeader& header() const noexcept { return header_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool contains(std::string_view tensor) const noexcept { return header_.find(tensor) != nullptr; }
  /// Throws Error{parse} when there is no such tensor.
  [[nodiscard]] Array load(std::string_view tensor) const;

 private:
  std::string path_;
  MappedFile file_;
  SafetensorsHeader header_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous, on the CPU
};
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace tessera::files
