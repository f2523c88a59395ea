// SPDX-License-Identifier: Apache-2.0
// The device code's headers as text, embedded at build time: an installed library needs no files to compile kernels.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera::cuda {

struct Header {
  const char* name;  // as it is included: "cuda/tile/swizzle.cuh", relative to src
  const char* text;
};

/// src/shared/**.h and src/cuda/**.cuh, sorted by name.
std::span<const Header> embedded_headers() noexcept;

/// The same set read from a source tree's src folder, to try changes without building. Throws Error{io}.
struct HeaderFiles {
  explicit HeaderFiles(const std::string& folder);
  HeaderFiles(const HeaderFiles&) = delete;
  HeaderFiles& operator=(const HeaderFiles&) = delete;
  std::vector<Header> headers;

 private:
  std::vector<std::pair<std::string, std::string>> texts_;
};

}  // namespace tessera::cuda
