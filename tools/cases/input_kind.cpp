// SPDX-License-Identifier: Apache-2.0
#include "cases/input_kind.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "tessera/error.h"

namespace tessera::cases {
namespace {

constexpr std::string_view kNames[] = {"normal", "scale", "rising", "sink", "outliers", "nan_tail"};
constexpr float kRisePerKey = 0.125F;
constexpr float kSinkScore = 24.0F;
constexpr std::int64_t kOutlierPeriod = 256, kFirstOutlier = 97;
constexpr float kOutlierLength = 8.0F;
// The part of a rising score that element 0 of a key holds: its multiples are numbers of bf16 up to 16384.
constexpr float kCoarse = 64.0F;

}  // namespace

InputKind InputKind::parse(std::string_view text) {
  InputKind result;
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (std::size_t at = 0; at < std::size(kNames); ++at) {
    if (name != kNames[at]) continue;
    result.kind = static_cast<Kind>(at);
    if ((result.kind == Kind::scale) != (colon != std::string_view::npos)) break;
    if (colon == std::string_view::npos) return result;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, result.factor);
    if (error == std::errc{} && stop == end && std::isfinite(result.factor)) return result;
    break;
  }
  throw Error(ErrorCode::parse, "inputs", fmt::format("\"{}\"", text),
              "normal, scale:F, rising, sink, outliers or nan_tail");
}

std::string InputKind::to_string() const {
  const std::string name(kNames[static_cast<std::size_t>(kind)]);
  return kind == Kind::scale ? fmt::format("{}:{}", name, factor) : name;
}

float InputKind::query(float drawn, std::int64_t dim, std::int64_t head_dim) const noexcept {
  if (kind == Kind::scale) return drawn * factor;
  const int constants = kind == Kind::rising ? 2 : kind == Kind::sink ? 1 : 0;
  return dim < constants ? std::sqrt(static_cast<float>(head_dim)) : drawn;
}

float InputKind::key(float drawn, std::int64_t key, std::int64_t keys, std::int64_t dim) const noexcept {
  switch (kind) {
    case Kind::rising: {
      const float score = static_cast<float>(keys - 1 - key) * kRisePerKey;
      const float coarse = std::floor(score / kCoarse) * kCoarse;
      return dim == 0 ? coarse : dim == 1 ? score - coarse : drawn;
    }
    case Kind::sink:
      return dim == 0 ? (key == 0 ? kSinkScore : 0.0F) : drawn;
    case Kind::outliers:
      return key % kOutlierPeriod == kFirstOutlier ? drawn * kOutlierLength : drawn;
    default:
      return drawn;
  }
}

}  // namespace tessera::cases
