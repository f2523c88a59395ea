// SPDX-License-Identifier: Apache-2.0
// A pack: many compiled kernels in one file, which is read in place or embedded in the library. It has an index, sorted
// by key, and then the entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/jit/cache_entry.h"

namespace tessera::cuda {

class PackWriter {
 public:
  void add(const Digest& key, const std::string& name, const std::string& architecture, const Compiled& compiled);
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] std::vector<char> bytes() const;

 private:
  struct Written {
    std::string name, architecture, compiler;
    std::vector<char> entry;
  };
  std::map<Digest, Written> entries_;
};

/// A pack in memory or in a file. Entries are read and checked when they are looked up. Only the index of a file is
/// kept in memory, and the file is opened again for each entry. If it was changed, replaced or removed meanwhile, its
/// kernels are not used any more.
class Pack {
 public:
  /// What the index has about a kernel.
  struct Listed {
    Digest key{};
    std::string name, architecture;
    std::uint64_t bytes = 0;  // of its entry
  };

  Pack() = default;
  /// The bytes must outlive the pack. Throws Error{parse} naming `argument` if they are not a pack.
  explicit Pack(std::span<const char> bytes, const std::string& argument = "pack");
  /// Throws Error{io} if the file cannot be opened or is not regular, Error{parse} naming it if it is not a pack.
  static Pack open(const std::string& path);

  [[nodiscard]] std::size_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }        // "" in memory
  [[nodiscard]] const std::string& version() const noexcept { return version_; }  // of the Tessera that wrote it
  [[nodiscard]] const std::string& compiler() const noexcept {
    return compiler_;
  }  // the newest compiler of its kernels: "12.9"
  /// All kernels in the order of their keys.
  [[nodiscard]] std::vector<Listed> listed() const;
  [[nodiscard]] std::optional<Compiled> find(const Digest& key, Checksum checksum) const;

 private:
  struct Row {
    Digest key;
    std::uint64_t offset;  // from the beginning of the pack
    std::uint64_t bytes;
    std::uint32_t name;  // offset in the names, which follow the rows
    std::uint32_t name_bytes;
    char architecture[16];  // padded by 0
  };
  static_assert(sizeof(Row) == 72);
  struct Identity {
    std::uint64_t device = 0, inode = 0, size = 0;
    std::int64_t seconds = 0, nanoseconds = 0;
    bool operator==(const Identity&) const = default;
  };
  friend class PackWriter;

  template <class Read>
  void read_index(std::uint64_t total, const std::string& argument, Read read);

  std::span<const char> bytes_;
  std::string path_;
  Identity identity_;
  std::uint64_t total_ = 0;
  std::string version_, compiler_;
  std::vector<Row> rows_;
  std::string names_;
};

/// The pack that is embedded in this library; empty if the library was built without.
const Pack& embedded_pack();

/// The pack file of this process (pack_search.cpp has the places where it may be). It is opened when it is first
/// needed, and again after set_kernel_pack.
struct PackInUse {
  Pack pack;                        // empty if there is none
  std::vector<std::string> sought;  // the places without a pack; empty if there is one
  std::string problem;              // why a file that exists was not used, or ""
};
const PackInUse& pack_in_use();

}  // namespace tessera::cuda
