// SPDX-License-Identifier: Apache-2.0
// --score-text, --score-derivative and --mask-text: callables that problem lines may name, from files of C++ text.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tessera::cli {

struct TextOptions {
  std::vector<std::string> scores;       // "NAME=FILE" or "NAME=FILE,EXTRA:DTYPE:RANK,…"
  std::vector<std::string> derivatives;  // "NAME=FILE" of one of these
  std::vector<std::string> masks;

  /// Throws Error{parse} naming the option, Error{io}, and what register_score and register_mask throw.
  void register_all() const;
};
void add_text_options(CLI::App& verb, TextOptions& options);

/// All of a file. Throws Error{io}.
std::string read_text(const std::string& path);

}  // namespace tessera::cli
