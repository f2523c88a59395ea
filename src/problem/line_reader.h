// SPDX-License-Identifier: Apache-2.0
// Reads "word key=value flag …" lines: the problem line and the wishes. Every error names the key.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "problem/grammar.h"
#include "tessera/error.h"

namespace tessera::detail {

/// A renamed key of the problem line. Both names are read until the next version.
struct RenamedKey {
  std::string_view old_name;
  std::string_view name;
};
inline constexpr RenamedKey kRenamedKeys[] = {
    {"band", "window"}, {"affine", "compressed_causal"}, {"spoiled", "non_finite"}};

/// Fields between separators; "a::b" has three, "" has one.
std::vector<std::string_view> split(std::string_view text, char separator);

class LineReader {
 public:
  /// Tokens are separated by spaces and tabs. The first is the operation unless `has_operation` is false. The text must
  /// outlive the reader. An old name of a renamed key is read as the new one; the first use of each is reported on
  /// stderr. Throws Error{parse} on a key that occurs twice.
  explicit LineReader(std::string_view text, bool has_operation = true);

  [[nodiscard]] std::string_view operation() const noexcept { return operation_; }
  /// Value of "key=value"; nullopt when the key is absent.
  [[nodiscard]] std::optional<std::string_view> value(std::string_view key) const;
  /// Whether the bare word is there.
  [[nodiscard]] bool flag(std::string_view key) const;
  [[nodiscard]] std::optional<std::int64_t> integer(std::string_view key) const;
  [[nodiscard]] std::optional<float> number(std::string_view key) const;
  template <class Value, std::size_t N>
  [[nodiscard]] std::optional<Value> word(std::string_view key, const Word<Value> (&table)[N]) const {
    const auto text = value(key);
    if (!text) return std::nullopt;
    return to_word(key, *text, table);
  }

  [[nodiscard]] std::int64_t to_integer(std::string_view key, std::string_view text) const;
  template <class Value, std::size_t N>
  [[nodiscard]] Value to_word(std::string_view key, std::string_view text, const Word<Value> (&table)[N]) const {
    std::string want;
    for (const Word<Value>& word : table) {
      if (word.text == text) return word.value;
      want.append(want.empty() ? "" : ", ").append(word.text);
    }
    reject(key, text, "one of " + want);
  }
  /// Throws Error{parse} with `got` as it is.
  [[noreturn]] void fail(std::string_view key, std::string_view got, std::string_view want) const;
  /// Throws Error{parse} that quotes `text`, which is the caller's.
  [[noreturn]] void reject(std::string_view key, std::string_view text, std::string_view want) const;
  /// Throws Error{parse} on the first token that has not been read.
  void check_all_used() const;

 private:
  struct Token {
    std::string_view key;
    std::optional<std::string_view> value;
    mutable bool used = false;
  };
  [[nodiscard]] const Token* find(std::string_view key) const;

  std::string_view operation_;
  std::vector<Token> tokens_;
};

}  // namespace tessera::detail
