// SPDX-License-Identifier: Apache-2.0
// Whole files: read through a memory map, written so that a reader sees the old file or the new one, never a part.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace tessera::files {

/// A file mapped for reading.
class MappedFile {
 public:
  /// Throws Error{io} naming the path.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Writes the parts one after the other into a temporary file beside `path`, then renames it. On failure the temporary
/// file is removed, `path` is untouched, and Error{io} is thrown.
void write_atomically(const std::string& path, const std::vector<std::span<const std::byte>>& parts);
void write_atomically(const std::string& path, const std::string& text);

}  // namespace tessera::files
