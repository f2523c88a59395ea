// SPDX-License-Identifier: Apache-2.0
// Compiled kernels as files: <folder>/nvrtc-<version>/<architecture>/<key>.kernel. Several processes can use the cache:
// a file appears complete or not at all (it is written under another name, flushed and renamed), and a checksum detects
// later damage. Folders and files are used only if they belong to this user or root and no other user can write them.
#pragma once

#include <optional>
#include <string>

#include "cuda/jit/cache_entry.h"

namespace tessera::cuda {

class DiskCache {
 public:
  explicit DiskCache(std::string folder) : folder_(std::move(folder)) {}

  /// Finds the entry of `compiler`; if this is "", that of the newest compiler that has one. A file in the place of an
  /// entry that is not valid (damaged, a FIFO, larger than any kernel, writable by others) is removed, which is logged.
  [[nodiscard]] std::optional<Compiled> find(const Digest& key, const std::string& architecture,
                                             const std::string& compiler) const;
  /// Throws Error{io} if the file cannot be written, or if another user could write to a folder of the cache.
  void store(const Digest& key, const std::string& architecture, const std::string& name,
             const Compiled& compiled) const;
  /// Makes the folder, writes a file in it and removes it. Throws as store() does if that fails.
  void check_writable() const;
  [[nodiscard]] std::string path_of(const Digest& key, const std::string& architecture,
                                    const std::string& compiler) const;

  /// The version of the compiler in a library file, "" if it was not remembered or the file has changed since.
  [[nodiscard]] std::string compiler_of(const std::string& library) const;
  /// Does nothing if the folder cannot be written.
  void remember_compiler(const std::string& library, const std::string& version) const;

 private:
  [[nodiscard]] std::optional<std::vector<char>> read_compilers() const;

  std::string folder_;
};

/// Writes a file beside `path`, flushes it and renames it to `path`. Makes missing folders. Throws Error{io}.
void replace_file(const std::string& path, std::span<const char> bytes);

}  // namespace tessera::cuda
