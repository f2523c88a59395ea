// SPDX-License-Identifier: Apache-2.0
#include "cases/line/case.h"

#include <fmt/format.h>

#include <charconv>
#include <fstream>

#include "tessera/error.h"

namespace tessera::cases {
namespace {

[[noreturn]] void reject(std::string_view key, std::string_view got, std::string want) {
  throw Error(ErrorCode::parse, std::string(key), fmt::format("\"{}\"", got), std::move(want));
}

template <class Number>
Number parse_number(std::string_view key, std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) reject(key, text, "a number");
  return value;
}

struct ListKey {
  std::string_view key;
  std::vector<std::int64_t> Values::*field;
};
constexpr ListKey kLists[] = {
    {"lens_q", &Values::lens_q},
    {"lens_k", &Values::lens_k},
    {"lens_k2", &Values::lens_k2},
    {"used_q", &Values::used_q},
    {"used_k", &Values::used_k},
    {"used_k2", &Values::used_k2},
    {"q_offset", &Values::q_offset},
    {"k_offset", &Values::k_offset},
    {"k_offset2", &Values::k_offset2},
    {"non_finite", &Values::non_finite},
    {"non_finite_rows", &Values::non_finite_rows},
    {"state_slots", &Values::state_slots},
    {"dest_slots", &Values::dest_slots},
    {"ring_cursors", &Values::ring_cursors},
};

struct UnsignedKey {
  std::string_view key;
  std::uint64_t Values::*field;
  std::uint64_t otherwise;
};
constexpr UnsignedKey kUnsigned[] = {
    {"seed", &Values::seed, 1}, {"drop_seed", &Values::drop_seed, 0}, {"drop_offset", &Values::drop_offset, 0}};

struct SignedKey {
  std::string_view key;
  std::int64_t Values::*field;
};
constexpr SignedKey kSigned[] = {{"batch_offset", &Values::batch_offset}, {"head_offset", &Values::head_offset}};

struct FlagKey {
  std::string_view word;  // the whole token
  bool Values::*field;
};
constexpr FlagKey kFlags[] = {{"drop_scalars", &Values::drop_scalars},
                              {"pages=shuffled", &Values::shuffled_pages},
                              {"slopes=batch", &Values::slopes_per_batch},
                              {"alibi_slopes=extreme", &Values::extreme_slopes},
                              {"sinks=extreme", &Values::extreme_sinks},
                              {"rotate_q", &Values::rotate_q},
                              {"state_slots=unbound", &Values::unbound_slots},
                              {"slot_ids=int64", &Values::long_slots},
                              {"slopes=zero", &Values::no_decay},
                              {"dstates=unbound", &Values::unbound_gradients}};

constexpr std::string_view kWishKeys[] = {"tile_q", "tile_kv", "splits", "stages", "warps", "loader", "implementation"};
constexpr std::string_view kStrides[] = {"packed", "bhsd", "gaps", "zero", "negative", "odd"};

std::vector<std::int64_t> parse_list(std::string_view key, std::string_view text) {
  std::vector<std::int64_t> list;
  while (true) {
    const std::size_t comma = text.find(',');
    list.push_back(parse_number<std::int64_t>(key, text.substr(0, comma)));
    if (comma == std::string_view::npos) return list;
    text.remove_prefix(comma + 1);
  }
}

/// Whether the token was one of ours.
bool read_value(Case& result, std::string_view token) {
  Values& values = result.values;
  for (const FlagKey& flag : kFlags) {
    if (flag.word == token) return values.*flag.field = true;
  }
  const std::size_t equals = token.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view key = token.substr(0, equals);
  const std::string_view text = token.substr(equals + 1);
  for (const ListKey& list : kLists) {
    if (list.key == key) return values.*list.field = parse_list(key, text), true;
  }
  for (const UnsignedKey& number : kUnsigned) {
    if (number.key == key) return values.*number.field = parse_number<std::uint64_t>(key, text), true;
  }
  for (const SignedKey& number : kSigned) {
    if (number.key == key) return values.*number.field = parse_number<std::int64_t>(key, text), true;
  }
  if (key == "density") return values.density = parse_number<float>(key, text), true;
  if (key == "inputs") return values.inputs = InputKind::parse(text), true;
  if (key == "isa") return result.isa = text, true;
  if (key == "threads") return result.threads = parse_number<int>(key, text), true;
  if (key == "strides") {
    for (std::size_t i = 0; i < std::size(kStrides); ++i) {
      if (kStrides[i] == text) return values.strides = static_cast<Strides>(i), true;
    }
    reject(key, text, "packed, bhsd, gaps, zero, negative or odd");
  }
  return false;
}

bool is_wish(std::string_view token) {
  for (const std::string_view key : kWishKeys) {
    if (token.size() > key.size() && token.starts_with(key) && token[key.size()] == '=') return true;
  }
  return false;
}

}  // namespace

Case Case::parse(std::string_view line) {
  Case result;
  std::string problem;
  std::string wishes;
  std::string seen = " ";
  while (!line.empty()) {
    const std::size_t end = line.find_first_of(" \t\r");
    const std::string_view token = line.substr(0, end);
    line.remove_prefix(end == std::string_view::npos ? line.size() : end + 1);
    if (token.empty()) continue;
    if (is_wish(token)) {
      wishes.append(wishes.empty() ? "" : " ").append(token);
    } else if (read_value(result, token)) {
      const std::string key = fmt::format(" {} ", token.substr(0, token.find('=')));
      if (seen.find(key) != std::string::npos) reject(token.substr(0, token.find('=')), token, "each key once");
      seen.append(key.substr(1));
    } else {
      problem.append(problem.empty() ? "" : " ").append(token);
    }
  }
  result.problem = Problem::parse(problem);
  result.wishes = Wishes::parse(wishes);
  return result;
}

std::string Case::to_string() const {
  const Values plain;
  std::string line = problem.to_string();
  for (const UnsignedKey& number : kUnsigned) {
    if (values.*number.field != number.otherwise) line += fmt::format(" {}={}", number.key, values.*number.field);
  }
  for (const ListKey& list : kLists) {
    if (!(values.*list.field).empty()) line += fmt::format(" {}={}", list.key, fmt::join(values.*list.field, ","));
  }
  for (const SignedKey& number : kSigned) {
    if (values.*number.field != 0) line += fmt::format(" {}={}", number.key, values.*number.field);
  }
  if (values.density != plain.density) line += fmt::format(" density={}", values.density);
  for (const FlagKey& flag : kFlags) {
    if (values.*flag.field) line += fmt::format(" {}", flag.word);
  }
  if (values.strides != plain.strides) {
    line += fmt::format(" strides={}", kStrides[static_cast<std::size_t>(values.strides)]);
  }
  if (values.inputs != plain.inputs) line += " inputs=" + values.inputs.to_string();
  const std::string wished = wishes.to_string();
  if (!wished.empty()) line += " " + wished;
  if (!isa.empty()) line += " isa=" + isa;
  if (threads != 1) line += fmt::format(" threads={}", threads);
  return line;
}

std::vector<Case> read_case_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, path, "a file that cannot be opened", "a readable file of case lines");
  std::vector<Case> cases;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    try {
      cases.push_back(Case::parse(line));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}:{}: {}", path, number, error.argument()), error.got(), error.want());
    }
  }
  if (file.bad()) throw Error(ErrorCode::io, path, "a file that cannot be read", "a readable file of case lines");
  return cases;
}

}  // namespace tessera::cases
