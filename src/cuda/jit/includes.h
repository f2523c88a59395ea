// SPDX-License-Identifier: Apache-2.0
// Which headers a kernel's source includes, itself or by other headers: what its cache key holds of them.
#pragma once

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/jit/headers.h"
#include "cuda/jit/sha256.h"

namespace tessera::cuda {

/// Reads every `#include "name"`, whatever #if around it says: rather one header too many in a key than one too few.
class Includes {
 public:
  /// The texts must outlive it.
  explicit Includes(std::span<const Header> headers);

  /// Names of the headers, sorted. A name that no header has is left out: the compiler tells of it.
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

/// Names that `text` includes itself, in its order.
std::vector<std::string_view> included_names(std::string_view text);

/// Those of the embedded headers; read once a process, in about 2 ms.
const Includes& embedded_includes();

}  // namespace tessera::cuda
