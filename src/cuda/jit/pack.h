// SPDX-License-Identifier: Apache-2.0
// Many compiled kernels in one file, which stays where it lies or is embedded: an index sorted by key, then the
// entries.
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

/// A pack in memory, or in a file. Entries are read, and checked, when they are found. Of a file only the index is
/// held, and it is opened anew for each entry: one that was cut short, replaced or removed meanwhile has no kernels any
/// more.
class Pack {
 public:
  /// What the index says of a kernel.
  struct Listed {
    Digest key{};
    std::string name, architecture;
    std::uint64_t bytes = 0;  // of its entry
  };

  Pack() = default;
  /// Of bytes that outlive it. Throws Error{parse} naming `argument` when they are no pack.
  explicit Pack(std::span<const char> bytes, const std::string& argument = "pack");
  /// Throws Error{io} when the file cannot be read, Error{parse} naming it when it is no pack.
  static Pack open(const std::string& path);

  [[nodiscard]] std::size_t size() const noexcept { return rows_.size(); }
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }        // "" in memory
  [[nodiscard]] const std::string& version() const noexcept { return version_; }  // of the Tessera that wrote it
  [[nodiscard]] const std::string& compiler() const noexcept {
    return compiler_;
  }  // of its kernels, the newest: "12.9"
  /// In the order of keys.
  [[nodiscard]] std::vector<Listed> listed() const;
  [[nodiscard]] std::optional<Compiled> find(const Digest& key, Checksum checksum) const;

 private:
  struct Row {
    Digest key;
    std::uint64_t offset;  // from the begin of the pack
    std::uint64_t bytes;
    std::uint32_t name;  // where it begins behind the rows
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

/// The one embedded in this library; empty when it was built without.
const Pack& embedded_pack();

/// The pack file of this process (settings.h says where it is sought), opened when it is first asked for and again
/// after set_kernel_pack.
struct PackInUse {
  Pack pack;                        // empty if there is none
  std::vector<std::string> sought;  // where there was none; empty if there is one
  std::string problem;              // why a file that is there was passed over, or ""
};
const PackInUse& pack_in_use();

}  // namespace tessera::cuda
