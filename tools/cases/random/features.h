// SPDX-License-Identifier: Apache-2.0
// What a case exercises, and how often every two such features came up together.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cases/line/case.h"

namespace tessera::cases {

inline constexpr std::size_t kMostFeatures = 144;
using FeatureSet = std::bitset<kMostFeatures>;

std::size_t feature_count() noexcept;
std::string_view feature_name(std::size_t feature) noexcept;
FeatureSet features_of(const Case& of);

/// "" when a problem may have both, else the reason why it cannot.
std::string_view why_apart(std::size_t a, std::size_t b) noexcept;

class FeatureHistogram {
 public:
  FeatureHistogram();
  void add(const FeatureSet& features);
  [[nodiscard]] std::uint64_t total() const noexcept { return total_; }
  [[nodiscard]] std::uint64_t count(std::size_t a, std::size_t b) const noexcept;  // a = b: of the feature alone
  /// Lines for people: each feature's count and share, the rarest pairs, and every possible pair below `least`.
  [[nodiscard]] std::string summary(std::uint64_t least) const;
  /// Tab-separated: feature, feature, count or the reason why they cannot meet.
  [[nodiscard]] std::string table() const;

 private:
  std::uint64_t total_ = 0;
  std::vector<std::uint64_t> counts_;  // (features, features)
};

}  // namespace tessera::cases
