// SPDX-License-Identifier: Apache-2.0
// A compiled kernel as bytes: one entry of the disk cache or of a pack, with its key and a checksum.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/jit/compile.h"
#include "cuda/jit/sha256.h"

namespace tessera::cuda {

/// A hash of everything that determines the code except the compiler: the texts of the headers that the source includes
/// (includes.h), the source text, the architecture and the options.
Digest kernel_key(const KernelSource& source, const std::string& architecture);

std::vector<char> write_entry(const Digest& key, const std::string& name, const Compiled& compiled);

struct Entry {
  Digest key{};
  std::string name;
  Compiled compiled;
};
enum class Checksum { verify, skip };
/// nullopt if the bytes are not a complete entry, or if the checksum is verified and does not match.
std::optional<Entry> read_entry(std::span<const char> bytes, Checksum checksum = Checksum::verify);

}  // namespace tessera::cuda
