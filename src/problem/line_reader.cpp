// SPDX-License-Identifier: Apache-2.0
#include "problem/line_reader.h"

#include <atomic>
#include <cstdio>
#include <iterator>

namespace tessera::detail {
namespace {

constexpr std::string_view kBlank = " \t";

/// The caller's text for a message: cut short, with unprintable bytes as '?'.
std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 60;
  std::string out;
  for (const char c : text.substr(0, kLongest)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > kLongest ? "…" : "");
}

/// The current name of a key. Reports each old name that is used, once per process.
std::string_view current_name(std::string_view key) {
  static std::atomic<bool> told[std::size(kRenamedKeys)];
  for (std::size_t i = 0; i < std::size(kRenamedKeys); ++i) {
    const RenamedKey& renamed = kRenamedKeys[i];
    if (key != renamed.old_name) continue;
    if (!told[i].exchange(true)) {
      std::fprintf(stderr, "tessera: '%s' in a problem line is '%s' now; the old word goes with the next version\n",
                   std::string(key).c_str(), std::string(renamed.name).c_str());
    }
    return renamed.name;
  }
  return key;
}

}  // namespace

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> fields;
  for (;;) {
    const std::size_t at = text.find(separator);
    fields.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return fields;
    text.remove_prefix(at + 1);
  }
}

LineReader::LineReader(std::string_view text, bool has_operation) {
  bool first = has_operation;
  for (;;) {
    const std::size_t begin = text.find_first_not_of(kBlank);
    if (begin == std::string_view::npos) return;
    text.remove_prefix(begin);
    const std::string_view token = text.substr(0, text.find_first_of(kBlank));
    text.remove_prefix(token.size());
    if (first) {
      operation_ = token;
      first = false;
      continue;
    }
    const std::size_t equals = token.find('=');
    Token parsed{current_name(token.substr(0, equals)), std::nullopt};
    if (equals != std::string_view::npos) parsed.value = token.substr(equals + 1);
    for (const Token& other : tokens_) {
      if (other.key == parsed.key) fail(parsed.key, "the key twice", "each key at most once");
    }
    tokens_.push_back(parsed);
  }
}

const LineReader::Token* LineReader::find(std::string_view key) const {
  for (const Token& token : tokens_) {
    if (token.key == key) {
      token.used = true;
      return &token;
    }
  }
  return nullptr;
}

std::optional<std::string_view> LineReader::value(std::string_view key) const {
  const Token* token = find(key);
  if (token == nullptr) return std::nullopt;
  if (!token->value || token->value->empty()) fail(key, "no value", "a value after =");
  return token->value;
}

bool LineReader::flag(std::string_view key) const {
  const Token* token = find(key);
  if (token == nullptr) return false;
  if (token->value) reject(key, *token->value, "the bare word, without a value");
  return true;
}

std::optional<std::int64_t> LineReader::integer(std::string_view key) const {
  const auto text = value(key);
  if (!text) return std::nullopt;
  return to_integer(key, *text);
}

std::int64_t LineReader::to_integer(std::string_view key, std::string_view text) const {
  std::int64_t out = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, out);
  if (result.ec == std::errc::result_out_of_range) reject(key, text, "an integer that fits in 64 bits");
  if (result.ec != std::errc{} || result.ptr != end) reject(key, text, "an integer");
  return out;
}

std::optional<float> LineReader::number(std::string_view key) const {
  const auto text = value(key);
  if (!text) return std::nullopt;
  float out = 0.0F;
  const char* end = text->data() + text->size();
  const auto result = std::from_chars(text->data(), end, out);
  if (result.ec == std::errc::result_out_of_range) reject(key, *text, "a number that fits in fp32");
  if (result.ec != std::errc{} || result.ptr != end) reject(key, *text, "a number");
  return out;
}

void LineReader::fail(std::string_view key, std::string_view got, std::string_view want) const {
  throw Error(ErrorCode::parse, printable(key), std::string(got), std::string(want));
}

void LineReader::reject(std::string_view key, std::string_view text, std::string_view want) const {
  fail(key, "\"" + printable(text) + "\"", want);
}

void LineReader::check_all_used() const {
  for (const Token& token : tokens_) {
    if (token.used) continue;
    fail(token.key, "an unknown key", "a key of " + (operation_.empty() ? "the grammar" : std::string(operation_)));
  }
}

}  // namespace tessera::detail
