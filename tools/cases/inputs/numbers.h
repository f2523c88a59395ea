// SPDX-License-Identifier: Apache-2.0
// Reproducible random numbers for test data: the same on every machine and with every standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::cases {

/// xoshiro256++ (Blackman and Vigna 2019), seeded through splitmix64.
class RandomNumbers {
 public:
  /// Streams of one seed are independent.
  explicit RandomNumbers(std::uint64_t seed, std::uint64_t stream = 0) noexcept;

  std::uint64_t bits() noexcept;
  /// Uniform in [0, bound).
  std::int64_t below(std::int64_t bound) noexcept;
  /// Uniform in [least, most].
  std::int64_t between(std::int64_t least, std::int64_t most) noexcept { return least + below(most - least + 1); }
  bool chance(double probability) noexcept;
  template <class T, std::size_t N>
  T pick(const T (&from)[N]) noexcept {
    return from[below(static_cast<std::int64_t>(N))];
  }
  /// N(0, 1) by one of 65536 equally likely quantiles: the largest magnitude is 4.3.
  float normal() noexcept;

 private:
  std::array<std::uint64_t, 4> state_;
};

}  // namespace tessera::cases
