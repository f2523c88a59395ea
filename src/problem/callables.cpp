// SPDX-License-Identifier: Apache-2.0
// The built-in scores and masks, which a problem may name without binding a function.
#include <algorithm>
#include <cmath>

#include "tessera/executor.h"

namespace tessera {
namespace {

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) noexcept {
  const std::int64_t quotient = a / b;
  return a % b < 0 ? quotient - 1 : quotient;
}

// "relative": a linear penalty on distance; its derivative by the score is 1.
double relative_value(double score, const ScorePoint& at, void* /*user*/) {
  return score - 0.02 * std::abs(static_cast<double>(at.query - at.key));
}
double relative_derivative(double /*score*/, const ScorePoint& /*at*/, void* /*user*/) { return 1.0; }

// "soft_clip": 4·tanh(x / 4); derivative 1 − tanh²(x / 4).
double soft_clip_value(double score, const ScorePoint& /*at*/, void* /*user*/) { return 4.0 * std::tanh(score / 4.0); }
double soft_clip_derivative(double score, const ScorePoint& /*at*/, void* /*user*/) {
  const double t = std::tanh(score / 4.0);
  return 1.0 - t * t;
}

// "document": positions fall into documents of 40 tokens; a query sees its own document.
constexpr std::int64_t kDocument = 40;
bool document_visible(const ScorePoint& at, void* /*user*/) {
  return floor_div(at.query, kDocument) == floor_div(at.key, kDocument);
}
TileClass document_classify(const TileBounds& tile, void* /*user*/) {
  if (tile.query_begin >= tile.query_end || tile.key_begin >= tile.key_end) return TileClass::none;
  const std::int64_t query_first = floor_div(tile.query_begin, kDocument);
  const std::int64_t query_last = floor_div(tile.query_end - 1, kDocument);
  const std::int64_t key_first = floor_div(tile.key_begin, kDocument);
  const std::int64_t key_last = floor_div(tile.key_end - 1, kDocument);
  if (query_last < key_first || key_last < query_first) return TileClass::none;
  const bool one_document = query_first == query_last && key_first == key_last && query_first == key_first;
  return one_document ? TileClass::full : TileClass::partial;
}

// "checkerboard": squares of 8×8 positions, visible where the parities agree.
bool checkerboard_visible(const ScorePoint& at, void* /*user*/) {
  return ((floor_div(at.query, 8) + floor_div(at.key, 8)) & 1) == 0;
}

// "prefix": the first 24 positions see each other and are seen by all; the rest is causal.
constexpr std::int64_t kPrefix = 24;
bool prefix_visible(const ScorePoint& at, void* /*user*/) { return at.key < kPrefix || at.key <= at.query; }
TileClass prefix_classify(const TileBounds& tile, void* /*user*/) {
  if (tile.query_begin >= tile.query_end || tile.key_begin >= tile.key_end) return TileClass::none;
  const std::int64_t key_last = tile.key_end - 1;
  if (key_last < kPrefix || key_last <= tile.query_begin) return TileClass::full;
  const bool any = tile.key_begin < kPrefix || tile.key_begin <= tile.query_end - 1;
  return any ? TileClass::partial : TileClass::none;
}

}  // namespace

std::optional<ScoreFunction> builtin_score(std::string_view name) noexcept {
  if (name == "relative") return ScoreFunction{relative_value, relative_derivative, nullptr};
  if (name == "soft_clip") return ScoreFunction{soft_clip_value, soft_clip_derivative, nullptr};
  return std::nullopt;
}

std::optional<MaskFunction> builtin_mask(std::string_view name) noexcept {
  if (name == "document") return MaskFunction{document_visible, document_classify, nullptr};
  if (name == "checkerboard") return MaskFunction{checkerboard_visible, nullptr, nullptr};
  if (name == "prefix") return MaskFunction{prefix_visible, prefix_classify, nullptr};
  return std::nullopt;
}

}  // namespace tessera
