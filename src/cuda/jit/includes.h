// SPDX-License-Identifier: Apache-2.0
// The headers that a kernel's source includes, directly or by other headers. They are a part of its cache key.
#pragma once

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/jit/headers.h"
#include "cuda/jit/sha256.h"

namespace tessera::cuda {

/// Reads every `#include "name"`, even in an #if that is false: a key may have a header too many, but not one too few.
class Includes {
 public:
  /// The texts must outlive it.
  explicit Includes(std::span<const Header> headers);

  /// The names of the headers, sorted. A name that no header has is left out; the compiler reports it.
  [[nodiscard]] std::vector<std::string_view> of(std::string_view source) const;
  /// SHA-256 of their names and texts.
  [[nodiscard]] Digest digest(std::string_view source) const;

 private:
  struct File {
    Digest digest;
    std::vector<std::string_view> includes;
  };
  std::map<std::string_view, File> files_;
};

/// The names that `text` includes directly, in its order.
std::vector<std::string_view> included_names(std::string_view text);

/// The includes of the embedded headers; they are read once in a process, in about 2 ms.
const Includes& embedded_includes();

}  // namespace tessera::cuda
