// SPDX-License-Identifier: Apache-2.0
// How queries and keys are drawn: N(0, 1) has scores of 1 everywhere, those of trained models are larger, rise, or have
// a few keys that outweigh the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::cases {

/// What becomes of numbers drawn from N(0, 1). Scores are meant under the default scale, 1 / sqrt(head_dim).
struct InputKind {
  enum class Kind : std::uint8_t {
    normal,       // as drawn
    scale,        // scale:F: queries times F
    rising,       // scores rise by 1/8 a key from the last key to the first, on top of N(0, 1)
    sink,         // the scores of key 0 are 24 higher
    outliers,     // one key of 256 is 8 times as long
    nan_tail,     // rows of K and V that no sequence uses are NaN: of cases always, of `bench` only so
    activations,  // activations:FILE: q, k and v of a trained model (activations.h)
  };
  Kind kind = Kind::normal;
  float factor = 1.0F;  // of scale
  std::string file;     // of activations, with the prefix of its tensors if there is one

  /// "normal", "scale:8", "rising", "sink", "outliers", "nan_tail" or "activations:FILE". Throws Error{parse} about
  /// `inputs`.
  static InputKind parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;
  bool operator==(const InputKind&) const = default;

  /// Element `dim` of a query of `head_dim`.
  [[nodiscard]] float query(float drawn, std::int64_t dim, std::int64_t head_dim) const noexcept;
  /// Element `dim` of key `key` of a sequence of `keys`.
  [[nodiscard]] float key(float drawn, std::int64_t key, std::int64_t keys, std::int64_t dim) const noexcept;
};

/// Changes q, k and v of an attention, which hold numbers of N(0, 1) where sequences use them, to what `kind` says:
/// rows in use, so nan_tail changes nothing. Query i of n stands beside key m − n + i of m, over both sources.
void apply_input_kind(const InputKind& kind, const Problem& problem, const Bindings& bindings);

}  // namespace tessera::cases
