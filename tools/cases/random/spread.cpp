// SPDX-License-Identifier: Apache-2.0
#include "cases/random/spread.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "cases/random/features.h"

namespace tessera::cases {
namespace {

/// A word of a line with its number in place of numbers like it: "sk=0"; "sk=16" of whole vectors; "sk=1" of others and
/// of several numbers, as of sequences (20,0,37) or blocks (16x64).
std::string without_its_number(const std::string& word) {
  const std::size_t value = word.find('=') + 1;
  if (value == 0 || word.find_first_not_of("0123456789+-.,ex", value) != std::string::npos) return word;
  const bool whole = word.find_first_not_of("0123456789", value) == std::string::npos && word.size() - value < 10;
  const int number = whole ? std::stoi(word.substr(value)) : 1;
  return word.substr(0, value) + (number == 0 ? "0" : number % 16 == 0 ? "16" : "1");
}

std::vector<std::string> words_of(const Case& one) {
  std::istringstream line(one.to_string());
  std::string word;
  line >> word;  // the operation
  const std::string front = word + (one.problem.pass == Pass::backward ? " backward " : " forward ");
  std::vector<std::string> words{front};
  while (line >> word) words.push_back(front + without_its_number(word));
  const FeatureSet features = features_of(one);
  for (std::size_t i = 0; i < feature_count(); ++i) {
    if (features[i]) words.push_back(front + "with " + std::string(feature_name(i)));
  }
  return words;
}

}  // namespace

std::set<std::size_t> cover(std::vector<std::vector<std::string>> words_of_entries) {
  std::set<std::size_t> taken;
  while (true) {
    const auto most = std::max_element(words_of_entries.begin(), words_of_entries.end(),
                                       [](const auto& a, const auto& b) { return a.size() < b.size(); });
    if (most == words_of_entries.end() || most->empty()) return taken;
    taken.insert(static_cast<std::size_t>(most - words_of_entries.begin()));
    const std::set<std::string> seen(most->begin(), most->end());
    for (std::vector<std::string>& words : words_of_entries) {
      std::erase_if(words, [&](const std::string& word) { return seen.contains(word); });
    }
  }
}

std::set<std::size_t> spread_of(std::span<const Case> cases) {
  std::vector<std::vector<std::string>> words;
  words.reserve(cases.size());
  for (const Case& one : cases) words.push_back(words_of(one));
  return cover(std::move(words));
}

}  // namespace tessera::cases
