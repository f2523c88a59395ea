// SPDX-License-Identifier: Apache-2.0
// q, k and v of a trained model, from a file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/problem.h"

namespace tessera::cases {

/// (tokens, heads, dims) of numbers.
struct ActivationRows {
  std::int64_t tokens = 0, heads = 0, dims = 0;
  std::vector<float> elements;

  /// A token or head beyond the last one is one of the first again.
  [[nodiscard]] float at(std::int64_t token, std::int64_t head, std::int64_t dim) const;
};

/// What one layer of the model multiplied.
struct ActivationSet {
  std::string prefix;  // of the tensors' names: "layer0."
  ActivationRows q, k, v;

  /// The file's query head for query head `head` of a problem with `group` of them to a key head: those that shared a
  /// key head still do.
  [[nodiscard]] std::int64_t query_head(std::int64_t head, std::int64_t group) const;
};

inline constexpr std::string_view kActivationsEnd = ".safetensors";  // of the file's name

/// The sets PREFIXq, PREFIXk and PREFIXv of a file, ascending by prefix. `source`: FILE.safetensors, or
/// FILE.safetensors:PREFIX for those whose names begin so. Throws Error{io} or Error{parse} about the file,
/// Error{invalid_argument} about `inputs` where the file does not fit the problem.
std::vector<ActivationSet> load_activations(std::string_view source, const Problem& problem);

}  // namespace tessera::cases
