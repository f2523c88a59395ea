// SPDX-License-Identifier: Apache-2.0
// Compiled kernels as files: <folder>/nvrtc-<version>/<architecture>/<key>.kernel. Safe between processes: a file
// appears complete or not at all (written aside, flushed, renamed), and one that was damaged since is found by its
// checksum. Folders and files count only if they belong to this user or root and no other user can write them.
#pragma once

#include <optional>
#include <string>

#include "cuda/jit/cache_entry.h"

namespace tessera::cuda {

class DiskCache {
 public:
  explicit DiskCache(std::string folder) : folder_(std::move(folder)) {}

  /// The entry of that compiler; of any, the newest first, when it is "". What is in an entry's place but is none
  /// (damaged, a FIFO, larger than any kernel, writable by others) is removed, which is logged.
  [[nodiscard]] std::optional<Compiled> find(const Digest& key, const std::string& architecture,
                                             const std::string& compiler) const;
  /// Throws Error{io} when the file cannot be written, or a folder of the cache could be written by another user.
  void store(const Digest& key, const std::string& architecture, const std::string& name,
             const Compiled& compiled) const;
  /// Throws as store does where store would: the folder is made, a file in it written and removed.
  void check_writable() const;
  [[nodiscard]] std::string path_of(const Digest& key, const std::string& architecture,
                                    const std::string& compiler) const;

  /// Version of the compiler in a library file, "" if it was not remembered or the file has changed since.
  [[nodiscard]] std::string compiler_of(const std::string& library) const;
  /// Does nothing when it cannot be written.
  void remember_compiler(const std::string& library, const std::string& version) const;

 private:
  [[nodiscard]] std::optional<std::vector<char>> read_compilers() const;

  std::string folder_;
};

/// Writes beside `path`, flushes to the disk, renames. Makes the folders. Throws Error{io}.
void replace_file(const std::string& path, std::span<const char> bytes);

}  // namespace tessera::cuda
