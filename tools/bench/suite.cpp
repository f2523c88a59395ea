// SPDX-License-Identifier: Apache-2.0
#include "bench/suite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "tessera/error.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMaxCases = 10'000;  // of one line; more is a slip of the pen

std::vector<std::string> alternatives(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char letter : text) {
    if (letter == ',') {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  return parts;
}

constexpr std::int64_t kMostSequences = 1 << 20;  // of one length

std::vector<std::int64_t> parse_lengths(const char* key, const std::string& text) {
  std::vector<std::int64_t> lengths;
  for (const std::string& part : alternatives(text)) {
    const char* end = part.data() + part.size();
    std::int64_t length = 0, times = 1;
    auto [stop, error] = std::from_chars(part.data(), end, length);
    if (error == std::errc{} && stop != end && *stop == 'x') {
      const auto [behind, wrong] = std::from_chars(stop + 1, end, times);
      stop = behind;
      error = wrong;
    }
    if (error != std::errc{} || stop != end || times < 1 || times > kMostSequences) {
      throw Error(ErrorCode::parse, key, "'" + text + "'", fmt::format("{}=100,300, or {}=100x8,300", key, key));
    }
    lengths.insert(lengths.end(), static_cast<std::size_t>(times), length);
  }
  return lengths;
}

// Keys whose lengths are told apart from where the sequences lie.
bool has_cache(const Problem& problem) {
  return problem.kv.layout != KvLayout::varlen && (problem.kv.seqused || problem.kv.page_size > 0);
}

void check_lengths(const BenchCase& of) {
  const Problem& problem = of.problem;
  if (of.lengths.empty()) return;
  const auto fail = [](const std::string& got, const std::string& want) {
    throw Error(ErrorCode::invalid_argument, "lens", got, want);
  };
  const bool packs_keys = problem.kv.layout == KvLayout::varlen;
  if (problem.q_layout != Layout::varlen || problem.is_linear() || !(packs_keys || has_cache(problem))) {
    fail("a problem of dense queries or keys", "attention with layout=varlen, keys packed too or in a cache");
  }
  if (problem.list || problem.bwd_list || problem.kv2) fail("a problem with a list or two sources", "neither");
  std::int64_t sum = 0;
  for (const std::int64_t length : of.lengths) {
    if (length < 0 || length > (packs_keys ? std::min(problem.seqlen_q, problem.kv.seqlen) : problem.seqlen_q)) {
      fail(std::to_string(length), packs_keys ? "0 to sq and sk" : "0 to sq");
    }
    sum += length;
  }
  if (static_cast<std::int64_t>(of.lengths.size()) != problem.batch) {
    fail(std::to_string(of.lengths.size()) + " lengths", "one for each of " + std::to_string(problem.batch));
  }
  if (sum > problem.total_q || (packs_keys && sum > problem.kv.total)) {
    fail(std::to_string(sum) + " tokens", packs_keys ? "at most tq and tk" : "at most tq");
  }
}

void check_key_lengths(const BenchCase& of) {
  const Problem& problem = of.problem;
  const auto fail = [](const std::string& got, const std::string& want) {
    throw Error(ErrorCode::invalid_argument, "lens_k", got, want);
  };
  if (of.key_lengths.empty()) {
    if (of.inputs.kind == cases::InputKind::Kind::nan_tail) {
      throw Error(ErrorCode::invalid_argument, "inputs", "nan_tail with keys that fill the cache",
                  "lens_k= below sk on the same line");
    }
    return;
  }
  if (problem.operation != Operation::attention || !has_cache(problem)) {
    fail("a problem without a cache", "attention with keys in pages, or dense ones with seqused_k");
  }
  if (problem.list || problem.bwd_list) fail("a problem with a list", "none");
  const auto count = static_cast<std::int64_t>(of.key_lengths.size());
  if (count != 1 && count != problem.batch) {
    fail(std::to_string(count) + " lengths", "1, or one for each of " + std::to_string(problem.batch));
  }
  for (const std::int64_t length : of.key_lengths) {
    if (length < 0 || length > problem.kv.seqlen) {
      fail(std::to_string(length), fmt::format("0 to sk, {}", problem.kv.seqlen));
    }
  }
}

BenchCase parse_case(const std::string& line) {
  BenchCase result;
  std::istringstream words(line);
  std::string rest;
  for (std::string word; words >> word;) {
    if (word.compare(0, 5, "lens=") == 0) {
      result.lengths = parse_lengths("lens", word.substr(5));
      continue;
    }
    if (word.compare(0, 7, "lens_k=") == 0) {
      result.key_lengths = parse_lengths("lens_k", word.substr(7));
      continue;
    }
    if (word.compare(0, 7, "inputs=") == 0) {
      result.inputs = cases::InputKind::parse(word.substr(7));
      continue;
    }
    if (word == "state_slots=in_order") {
      result.slots_in_order = true;
      continue;
    }
    if (word.compare(0, 8, "density=") != 0) {
      rest += rest.empty() ? word : " " + word;
      continue;
    }
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data() + 8, end, result.density);
    if (error != std::errc{} || stop != end || !(result.density > 0.0 && result.density <= 1.0)) {
      throw Error(ErrorCode::parse, "density", "'" + word.substr(8) + "'", "a number above 0 and at most 1");
    }
  }
  result.problem = Problem::parse(rest);
  if (result.density < 1.0 && !result.problem.list && !result.problem.bwd_list) {
    throw Error(ErrorCode::invalid_argument, "density", "a problem without a tile list", "list= on the same line");
  }
  if (result.slots_in_order && result.problem.operation != Operation::linear_decode) {
    throw Error(ErrorCode::invalid_argument, "state_slots", "a problem without states", "linear_decode");
  }
  if (result.inputs != cases::InputKind{} && result.problem.operation != Operation::attention) {
    throw Error(ErrorCode::invalid_argument, "inputs", result.inputs.to_string(),
                "attention, for other than normal ones");
  }
  check_lengths(result);
  check_key_lengths(result);
  return result;
}

}  // namespace

std::string BenchCase::text() const {
  std::string text = problem.to_string();
  if (density < 1.0) text += fmt::format(" density={}", density);
  if (slots_in_order) text += " state_slots=in_order";
  if (inputs != cases::InputKind{}) text += " inputs=" + inputs.to_string();
  if (!lengths.empty()) text += fmt::format(" lens={}", fmt::join(lengths, ","));
  if (!key_lengths.empty()) text += fmt::format(" lens_k={}", fmt::join(key_lengths, ","));
  return text;
}

std::vector<std::string> expand_braces(const std::string& line) {
  std::vector<std::string> results{""};
  std::size_t at = 0;
  while (at < line.size()) {
    const std::size_t open = line.find_first_of("{}", at);
    for (std::string& each : results) each += line.substr(at, open == std::string::npos ? open : open - at);
    if (open == std::string::npos) break;
    const std::size_t close = line.find_first_of("{}", open + 1);
    if (line[open] == '}' || close == std::string::npos || line[close] == '{') {
      throw Error(ErrorCode::parse, "braces", "'" + line.substr(open) + "'", "{a,b,…}, not nested");
    }
    const std::vector<std::string> choices = alternatives(line.substr(open + 1, close - open - 1));
    if (results.size() * choices.size() > kMaxCases) {
      throw Error(ErrorCode::parse, "braces", "more than 10000 problems", "fewer axes on a line");
    }
    std::vector<std::string> longer;
    for (const std::string& each : results) {
      for (const std::string& choice : choices) longer.push_back(each + choice);
    }
    results = std::move(longer);
    at = close + 1;
  }
  return results;
}

std::vector<BenchCase> parse_cases(const std::string& line, const std::string& pass) {
  std::vector<BenchCase> cases;
  for (const std::string& each : expand_braces(line)) {
    const bool fixed = pass.empty() || each.find("pass=") != std::string::npos || each.compare(0, 9, "attention") != 0;
    if (fixed || pass != "backward") cases.push_back(parse_case(each));
    if (!fixed && pass != "forward") cases.push_back(parse_case(each + " pass=backward"));
  }
  return cases;
}

std::vector<BenchCase> read_suite(const std::string& path, const std::string& pass) {
  std::ifstream file(path);
  if (!file) throw Error(ErrorCode::io, path, "a file that cannot be opened", "a suite of problems");
  std::vector<BenchCase> cases;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    line.resize(std::min(line.find('#'), line.size()));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      for (BenchCase& each : parse_cases(line.substr(line.find_first_not_of(" \t")), pass)) {
        cases.push_back(std::move(each));
      }
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}:{}: {}", path, number, error.argument()), error.got(), error.want());
    }
  }
  if (cases.empty()) throw Error(ErrorCode::parse, path, "no problem", "one a line");
  return cases;
}

}  // namespace tessera::cli
