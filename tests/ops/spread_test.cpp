// SPDX-License-Identifier: Apache-2.0
// The spread of the case files that `tessera verify --spread` runs, as scripts/sanitize does.
#include "cases/random/spread.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <regex>

#include "cases/line/case.h"
#include "cases/random/features.h"

namespace tessera::cases {
namespace {

TEST(Spread, CoverTakesTheFirstEntryWithMostThatIsMissing) {
  EXPECT_EQ(cover({{"a"}, {"a", "b"}, {"b", "c"}, {"c"}, {}}), (std::set<std::size_t>{1, 2}));
  EXPECT_EQ(cover({{"a", "b"}, {"b", "a"}}), std::set<std::size_t>{0});
  EXPECT_TRUE(cover({}).empty());
}

TEST(Spread, NumbersAreAlikeExceptZerosAndWholeVectors) {
  const auto taken = [](const std::vector<std::string>& lines) {
    std::vector<Case> cases;
    for (const std::string& line : lines) cases.push_back(Case::parse(line));
    return spread_of(cases).size();
  };
  EXPECT_EQ(taken({"attention sq=5 sk=70 seed=2", "attention sq=9 sk=71 seed=3"}), 1U);
  EXPECT_EQ(taken({"attention sq=5 sk=70", "attention sq=5 sk=80"}), 2U);
  EXPECT_EQ(taken({"attention sq=5 sk=70", "attention sq=5 sk=0"}), 2U);
  EXPECT_EQ(taken({"attention sq=5 sk=70", "attention pass=backward sq=5 sk=70"}), 2U);
  EXPECT_EQ(taken({"attention sq=5 dtype=bf16", "attention sq=5 dtype=fp16"}), 2U);
}

/// How many of the cases have each feature, and each word of a line that holds no number, by operation.
std::map<std::string, int> what_is_in(const std::vector<Case>& cases) {
  static const std::regex word("[^ ]+"), number(".*=[-+0-9.,ex]+");
  std::map<std::string, int> found;
  for (const Case& one : cases) {
    const std::string line = one.to_string(), operation = line.substr(0, line.find(' '));
    for (std::sregex_iterator at(line.begin(), line.end(), word), end; at != end; ++at) {
      if (!std::regex_match(at->str(), number)) ++found[operation + ": " + at->str()];
    }
    const FeatureSet features = features_of(one);
    for (std::size_t i = 0; i < feature_count(); ++i) {
      if (features[i]) ++found[std::string(feature_name(i))];
    }
  }
  return found;
}

TEST(Spread, OfEveryCaseFileHoldsAllThatTheFileHas) {
  std::size_t all = 0, few = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/tests/cases")) {
    if (entry.is_directory()) continue;  // cases too large for here
    const std::vector<Case> cases = read_case_file(entry.path().string());
    std::vector<Case> taken;
    for (const std::size_t i : spread_of(cases)) taken.push_back(cases[i]);
    EXPECT_FALSE(taken.empty()) << entry.path();
    const std::map<std::string, int> want = what_is_in(cases), got = what_is_in(taken);
    for (const auto& [what, times] : want) EXPECT_TRUE(got.contains(what)) << entry.path() << ": " << what;
    all += cases.size(), few += taken.size();
  }
  EXPECT_LT(few, all / 2);
}

}  // namespace
}  // namespace tessera::cases
