// SPDX-License-Identifier: Apache-2.0
// Files in memory for the tests of the readers.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace tessera::files::testing {

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline std::string little_endian(std::uint64_t value, int width) {
  std::string text;
  for (int at = 0; at < width; ++at) text += static_cast<char>(value >> (8 * at) & 0xFFU);
  return text;
}

/// An .npy file with this header text and so many bytes of data.
inline std::string npy(const std::string& header, std::size_t data_bytes, int major = 1) {
  return std::string("\x93NUMPY", 6) + static_cast<char>(major) + '\0' +
         little_endian(header.size(), major == 1 ? 2 : 4) + header + std::string(data_bytes, '\x01');
}

inline std::string safetensors(const std::string& header, std::size_t data_bytes) {
  return little_endian(header.size(), 8) + header + std::string(data_bytes, '\x01');
}

/// A folder of its own that is removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(std::filesystem::temp_directory_path() / "tessera-files-XXXXXX") {
    std::string pattern = path_.string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  [[nodiscard]] std::size_t count() const {
    std::size_t files = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path_)) ++files;
    return files;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::files::testing
