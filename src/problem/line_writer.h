// SPDX-License-Identifier: Apache-2.0
// Writes lines "word key=value flag …": the shortest ones that read back to the same problem.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::detail {

class LineWriter {
 public:
  explicit LineWriter(std::string_view operation) : text_(operation) {}

  void flag(std::string_view name, bool set) {
    if (set) text_.append(" ").append(name);
  }
  void word(std::string_view key, std::string_view value) { text_.append(" ").append(key).append("=").append(value); }
  void integer(std::string_view key, std::int64_t value) { word(key, std::to_string(value)); }
  void integer(std::string_view key, std::int64_t value, std::optional<std::int64_t> unless) {
    if (!unless || value != *unless) integer(key, value);
  }
  void number(std::string_view key, float value) {
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    word(key, std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data())));
  }
  void number(std::string_view key, float value, float unless) {
    if (value != unless) number(key, value);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace tessera::detail
