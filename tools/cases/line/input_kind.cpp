// SPDX-License-Identifier: Apache-2.0
#include "cases/line/input_kind.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <vector>

#include "cases/line/activations.h"
#include "cpu/reference/number.h"
#include "cpu/reference/sequences.h"
#include "tessera/error.h"

namespace tessera::cases {
namespace {

constexpr std::string_view kNames[] = {"normal", "scale", "rising", "sink", "outliers", "nan_tail", "activations"};
constexpr float kRisePerKey = 0.125F;
constexpr float kSinkScore = 24.0F;
constexpr std::int64_t kOutlierPeriod = 256, kFirstOutlier = 97;
constexpr float kOutlierLength = 8.0F;
// The part of a rising score that element 0 of a key holds: its multiples are numbers of bf16 up to 16384.
constexpr float kCoarse = 64.0F;

/// Replaces the elements of one token by element_of(drawn, head, dim), those that heads share once.
template <class ElementOf>
void replace(const Tensor& tensor, std::int64_t token, ElementOf element_of) {
  const auto last = static_cast<std::size_t>(tensor.rank - 1);
  const std::int64_t heads = tensor.strides[last - 1] == 0 ? 1 : tensor.shape[last - 1];
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t at = reference::token_offset(tensor, token, h);
    for (std::int64_t c = 0; c < tensor.shape[last]; ++c) {
      const auto drawn = static_cast<float>(reference::read(tensor, at + c));
      reference::write(tensor, at + c, element_of(drawn, h, c));
    }
  }
}

}  // namespace

InputKind InputKind::parse(std::string_view text) {
  InputKind result;
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (std::size_t at = 0; at < std::size(kNames); ++at) {
    if (name != kNames[at]) continue;
    result.kind = static_cast<Kind>(at);
    const bool has_argument = result.kind == Kind::scale || result.kind == Kind::activations;
    if (has_argument != (colon != std::string_view::npos)) break;
    if (!has_argument) return result;
    if (result.kind == Kind::activations) {
      result.file = text.substr(colon + 1);
      const std::size_t end = result.file.find(kActivationsEnd);
      if (end == std::string::npos) break;
      const std::string behind = result.file.substr(end + kActivationsEnd.size());
      if (behind.empty() || behind.front() == ':') return result;
      break;
    }
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, result.factor);
    if (error == std::errc{} && stop == end && std::isfinite(result.factor)) return result;
    break;
  }
  throw Error(ErrorCode::parse, "inputs", fmt::format("\"{}\"", text),
              "normal, scale:F, rising, sink, outliers, nan_tail or activations:FILE.safetensors");
}

std::string InputKind::to_string() const {
  const std::string name(kNames[static_cast<std::size_t>(kind)]);
  if (kind == Kind::activations) return fmt::format("{}:{}", name, file);
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

void apply_input_kind(const InputKind& kind, const Problem& problem, const Bindings& bindings) {
  using Kind = InputKind::Kind;
  if (kind.kind == Kind::normal || kind.kind == Kind::nan_tail) return;
  if (size_of(problem.k_type) == 1) {
    throw Error(ErrorCode::invalid_argument, "inputs",
                kind.to_string() + " for keys of " + std::string(tessera::to_string(problem.k_type)),
                "normal or nan_tail for operands of 8 bits");
  }
  const bool from_file = kind.kind == Kind::activations;
  const std::vector<ActivationSet> sets =
      from_file ? load_activations(kind.file, problem) : std::vector<ActivationSet>();
  const reference::Sequences sequences = reference::resolve_sequences(problem, bindings);
  std::vector<std::vector<bool>> done;  // tokens of the sources, whose pages sequences may share
  for (const std::int64_t tokens : sequences.key_tokens) done.emplace_back(static_cast<std::size_t>(tokens), false);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const ActivationSet* set = from_file ? &sets[static_cast<std::size_t>(b) % sets.size()] : nullptr;
    std::int64_t before = 0;  // keys of the sources in front
    for (std::size_t segment = 0; segment < sequences.keys.size(); ++segment) {
      const reference::SegmentSlots& slots = reference::segment_slots(segment);
      const reference::Rows& rows = sequences.keys[segment][static_cast<std::size_t>(b)];
      for (std::int64_t j = 0; j < rows.length && kind.kind != Kind::scale; ++j) {
        const std::int64_t token = reference::key_token(problem, bindings, segment, b, rows, j);
        if (done[segment][static_cast<std::size_t>(token)]) continue;
        done[segment][static_cast<std::size_t>(token)] = true;
        replace(bindings[slots.k], token, [&](float drawn, std::int64_t h, std::int64_t c) {
          return from_file ? set->k.at(before + j, h, c) : kind.key(drawn, j, rows.length, c);
        });
        if (!from_file) continue;
        replace(bindings[slots.v], token,
                [&](float, std::int64_t h, std::int64_t c) { return set->v.at(before + j, h, c); });
      }
      before += rows.length;
    }
    const reference::Rows& rows = sequences.query[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < rows.length; ++i) {
      replace(bindings[Slot::q], rows.first_token + i, [&](float drawn, std::int64_t h, std::int64_t c) {
        return from_file ? set->q.at(before - rows.length + i, set->query_head(h, problem.group()), c)
                         : kind.query(drawn, c, problem.head_dim_qk);
      });
    }
  }
}

}  // namespace tessera::cases
