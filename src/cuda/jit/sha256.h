// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4). It names cache entries and detects corrupt ones.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::cuda {

using Digest = std::array<std::uint8_t, 32>;

class Sha256 {
 public:
  Sha256& add(const void* data, std::size_t bytes) noexcept;
  /// Adds the length of the text and the text, so that the boundary between two texts changes the hash.
  Sha256& add_text(std::string_view text) noexcept;
  [[nodiscard]] Digest digest() const noexcept;

 private:
  void block(const std::uint8_t* bytes) noexcept;

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> pending_{};
  std::uint64_t bytes_ = 0;
};

/// Lower-case hexadecimal.
std::string to_hex(const Digest& digest);

}  // namespace tessera::cuda
