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

/// Everything that decides the code, except which compiler makes it: texts of the headers that the source includes
/// (includes.h), source text, architecture, options.
Digest kernel_key(const KernelSource& source, const std::string& architecture);

std::vector<char> write_entry(const Digest& key, const std::string& name, const Compiled& compiled);

struct Entry {
  Digest key{};
  std::string name;
  Compiled compiled;
};
enum class Checksum { verify, skip };
/// nullopt when the bytes are no complete entry, or not what was written.
std::optional<Entry> read_entry(std::span<const char> bytes, Checksum checksum = Checksum::verify);

}  // namespace tessera::cuda
