// SPDX-License-Identifier: Apache-2.0
// Many compiled kernels in one file, to be embedded: a sorted index of keys, then the entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/jit/cache_entry.h"

namespace tessera::cuda {

class PackWriter {
 public:
  void add(const Digest& key, const std::string& name, const Compiled& compiled);
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] std::vector<char> bytes() const;

 private:
  std::map<Digest, std::vector<char>> entries_;
};

/// A view of a pack's bytes, which must outlive it.
class Pack {
 public:
  Pack() = default;
  /// Throws Error{parse} naming `argument` when the bytes are no pack. Entries are read, and checked, when found.
  explicit Pack(std::span<const char> bytes, std::string_view argument = "pack");

  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::optional<Compiled> find(const Digest& key, Checksum checksum) const;
  /// By position in the order of keys, checked.
  [[nodiscard]] std::optional<Entry> entry(std::size_t index) const;

 private:
  [[nodiscard]] std::span<const char> bytes_of(std::size_t index) const;
  [[nodiscard]] Digest key_of(std::size_t index) const;

  std::span<const char> bytes_;
  std::size_t count_ = 0;
};

/// The one embedded in this library; empty when it was built without.
const Pack& embedded_pack();

}  // namespace tessera::cuda
