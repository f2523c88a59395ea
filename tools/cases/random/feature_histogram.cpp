// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "cases/random/features.h"

namespace tessera::cases {
namespace {

std::string share(std::uint64_t count, std::uint64_t total) {
  return fmt::format("{:5.1f}%", total == 0 ? 0.0 : 100.0 * static_cast<double>(count) / static_cast<double>(total));
}

}  // namespace

FeatureHistogram::FeatureHistogram() : counts_(feature_count() * feature_count(), 0) {}

void FeatureHistogram::add(const FeatureSet& features) {
  ++total_;
  const std::size_t n = feature_count();
  for (std::size_t a = 0; a < n; ++a) {
    if (!features[a]) continue;
    for (std::size_t b = a; b < n; ++b) counts_[a * n + b] += features[b] ? 1 : 0;
  }
}

std::uint64_t FeatureHistogram::count(std::size_t a, std::size_t b) const noexcept {
  return counts_[std::min(a, b) * feature_count() + std::max(a, b)];
}

std::string FeatureHistogram::summary(std::uint64_t least) const {
  std::string text = fmt::format("{} problems, {} features\n", total_, feature_count());
  std::vector<std::tuple<std::uint64_t, std::size_t, std::size_t>> pairs;
  std::size_t apart = 0;
  for (std::size_t a = 0; a < feature_count(); ++a) {
    text += fmt::format("  {:<20} {:>8} {}\n", feature_name(a), count(a, a), share(count(a, a), total_));
    for (std::size_t b = a + 1; b < feature_count(); ++b) {
      if (why_apart(a, b).empty()) {
        pairs.emplace_back(count(a, b), a, b);
      } else {
        ++apart;
      }
    }
  }
  std::sort(pairs.begin(), pairs.end());
  text += fmt::format("{} pairs of features can be combined, {} cannot\n", pairs.size(), apart);
  std::size_t shown = 0;
  for (const auto& [times, a, b] : pairs) {
    if (times >= least && shown >= 3) break;
    text +=
        fmt::format("  {} {} + {}: {}\n", times < least ? "below" : "rarest", feature_name(a), feature_name(b), times);
    ++shown;
  }
  const auto below =
      std::count_if(pairs.begin(), pairs.end(), [&](const auto& pair) { return std::get<0>(pair) < least; });
  text += fmt::format("pairs that came up less than {} times: {}\n", least, below);
  return text;
}

std::string FeatureHistogram::table() const {
  std::string text = "feature\tfeature\tproblems\n";
  for (std::size_t a = 0; a < feature_count(); ++a) {
    for (std::size_t b = a; b < feature_count(); ++b) {
      const std::string_view reason = why_apart(a, b);
      text += reason.empty() ? fmt::format("{}\t{}\t{}\n", feature_name(a), feature_name(b), count(a, b))
                             : fmt::format("{}\t{}\tapart: {}\n", feature_name(a), feature_name(b), reason);
    }
  }
  return text;
}

}  // namespace tessera::cases
