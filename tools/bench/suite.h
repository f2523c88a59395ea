// SPDX-License-Identifier: Apache-2.0
// Suites of problems to be measured: one problem a line, '#' comments, {a,b} axes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/line/input_kind.h"
#include "tessera/problem.h"

namespace tessera::cli {

struct BenchCase {
  Problem problem;
  double density = 1.0;  // part of the visible tiles that the tile list keeps; the token density=0.25 of a line
  // Lengths of packed sequences, of keys too where these are packed; the token lens=100,300x4 of a line. Empty: equal
  // ones.
  std::vector<std::int64_t> lengths;
  // Keys that the sequences of a cache have; one for all, or one each; the token lens_k=100,300. Empty: all full.
  std::vector<std::int64_t> key_lengths;
  /// linear_decode: sequences have consecutive states of the pool, not ones in random order; state_slots=in_order.
  bool slots_in_order = false;
  cases::InputKind inputs;  // how q and k of attention are drawn; the token inputs=scale:8 of a line
  [[nodiscard]] std::int64_t key_length(std::int64_t sequence) const {
    if (key_lengths.empty()) return problem.kv.seqlen;
    return key_lengths[key_lengths.size() == 1 ? 0 : static_cast<std::size_t>(sequence)];
  }
  /// The problem's text with what else the line gave: what a row of results is known by.
  [[nodiscard]] std::string text() const;
};

/// "a={1,2} {x,}" becomes "a=1 x", "a=1 ", "a=2 x", "a=2 ". Throws Error{parse} on unbalanced or nested braces.
std::vector<std::string> expand_braces(const std::string& line);
/// One line of a suite, braces expanded. `pass` is "", "forward", "backward" or "both" and adds pass= to lines without.
std::vector<BenchCase> parse_cases(const std::string& line, const std::string& pass);
/// Throws Error{io} or Error{parse} naming file and line.
std::vector<BenchCase> read_suite(const std::string& path, const std::string& pass);

}  // namespace tessera::cli
