// SPDX-License-Identifier: Apache-2.0
#include "cases/inputs/numbers.h"

#include <bit>
#include <cmath>
#include <vector>

namespace tessera::cases {
namespace {

constexpr int kQuantiles = 32768;  // of the positive half

/// Quantiles of the half-normal distribution at (i + 0.5) / 32768, by Newton's method from the quantile before.
std::vector<float> half_normal_quantiles() {
  std::vector<float> quantiles(kQuantiles);
  double x = 0;
  for (int i = 0; i < kQuantiles; ++i) {
    const double upper_tail = 1 - (i + 0.5) / kQuantiles;
    for (int step = 0; step < 4; ++step) {
      const double density = std::sqrt(2 / 3.14159265358979323846) * std::exp(-x * x / 2);
      x += (std::erfc(x / std::sqrt(2.0)) - upper_tail) / density;
    }
    quantiles[static_cast<std::size_t>(i)] = static_cast<float>(x);
  }
  return quantiles;
}

}  // namespace

RandomNumbers::RandomNumbers(std::uint64_t seed, std::uint64_t stream) noexcept {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15U + stream * 0xD1B54A32D192ED03U + 0x8BB84B93962EACC9U;
  for (std::uint64_t& word : state_) {  // splitmix64 (Steele, Lea and Flood 2014)
    x += 0x9E3779B97F4A7C15U;
    std::uint64_t z = x;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    word = z ^ (z >> 31);
  }
}

std::uint64_t RandomNumbers::bits() noexcept {
  const std::uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
  const std::uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = std::rotl(state_[3], 45);
  return result;
}

std::int64_t RandomNumbers::below(std::int64_t bound) noexcept {
  return static_cast<std::int64_t>((bits() >> 1) % static_cast<std::uint64_t>(bound));
}

bool RandomNumbers::chance(double probability) noexcept {
  return static_cast<double>(bits() >> 11) * 0x1p-53 < probability;
}

float RandomNumbers::normal() noexcept {
  static const std::vector<float> kQuantileTable = half_normal_quantiles();
  const std::uint64_t word = bits() >> 48;
  const float magnitude = kQuantileTable[word & (kQuantiles - 1)];
  return (word & kQuantiles) != 0 ? -magnitude : magnitude;
}

}  // namespace tessera::cases
