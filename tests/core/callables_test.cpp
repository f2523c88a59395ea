// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "tessera/executor.h"
#include "tessera/version.h"

namespace tessera {
namespace {

TEST(SlotNames, AreUniqueAndRoundTrip) {
  std::set<std::string_view> seen;
  for (int i = 0; i < static_cast<int>(Slot::count_); ++i) {
    const auto slot = static_cast<Slot>(i);
    EXPECT_TRUE(seen.insert(to_string(slot)).second) << to_string(slot);
    EXPECT_EQ(parse_slot(to_string(slot)), slot);
  }
  EXPECT_EQ(parse_slot("nothing"), std::nullopt);
  EXPECT_EQ(to_string(Slot::count_), "unknown slot");
}

TEST(Builtins, UnknownNamesHaveNone) {
  EXPECT_FALSE(builtin_score("checkerboard"));
  EXPECT_FALSE(builtin_mask("relative"));
  EXPECT_FALSE(builtin_mask(""));
}

TEST(Builtins, ScoreDerivativesAreDerivatives) {
  for (const char* name : {"relative", "soft_clip"}) {
    const ScoreFunction f = builtin_score(name).value();
    const ScorePoint at{1, 2, 30, -4};
    for (double x = -6.0; x <= 6.0; x += 0.37) {
      const double h = 1e-5;
      const double numeric = (f.value(x + h, at, f.user) - f.value(x - h, at, f.user)) / (2 * h);
      EXPECT_NEAR(f.derivative(x, at, f.user), numeric, 1e-8) << name << " at " << x;
    }
  }
  const ScoreFunction relative = builtin_score("relative").value();
  EXPECT_DOUBLE_EQ(relative.value(1.0, {0, 0, 3, 8}, nullptr), 1.0 - 0.1);
  const ScoreFunction clip = builtin_score("soft_clip").value();
  EXPECT_DOUBLE_EQ(clip.value(2.0, {}, nullptr), 4.0 * std::tanh(0.5));
}

TEST(Builtins, MasksAreWhatTheirNamesSay) {
  const MaskFunction document = builtin_mask("document").value();
  EXPECT_TRUE(document.visible({0, 0, 0, 39}, nullptr));
  EXPECT_FALSE(document.visible({0, 0, 39, 40}, nullptr));
  EXPECT_FALSE(document.visible({0, 0, -1, 0}, nullptr));
  EXPECT_TRUE(document.visible({0, 0, -1, -40}, nullptr));
  const MaskFunction board = builtin_mask("checkerboard").value();
  EXPECT_TRUE(board.visible({0, 0, 7, 7}, nullptr));
  EXPECT_FALSE(board.visible({0, 0, 7, 8}, nullptr));
  EXPECT_FALSE(board.visible({0, 0, -1, 0}, nullptr));
  const MaskFunction prefix = builtin_mask("prefix").value();
  EXPECT_TRUE(prefix.visible({0, 0, 0, 23}, nullptr));
  EXPECT_FALSE(prefix.visible({0, 0, 0, 24}, nullptr));
  EXPECT_TRUE(prefix.visible({0, 0, 24, 24}, nullptr));
}

/// What a classifier may say of a tile: none or full only if every element agrees.
void expect_classifier_agrees(const MaskFunction& mask, const TileBounds& tile) {
  bool any = false;
  bool all = true;
  for (std::int64_t q = tile.query_begin; q < tile.query_end; ++q) {
    for (std::int64_t k = tile.key_begin; k < tile.key_end; ++k) {
      const bool visible = mask.visible({tile.batch, tile.head, q, k}, mask.user);
      any = any || visible;
      all = all && visible;
    }
  }
  const TileClass got = mask.classify(tile, mask.user);
  if (got == TileClass::none) {
    EXPECT_FALSE(any);
  }
  if (got == TileClass::full) {
    EXPECT_TRUE(all);
  }
}

TEST(Builtins, ClassifiersAgreeWithTheirElements) {
  for (const char* name : {"document", "prefix"}) {
    const MaskFunction mask = builtin_mask(name).value();
    ASSERT_NE(mask.classify, nullptr);
    for (std::int64_t q = -60; q < 100; q += 7) {
      for (std::int64_t k = -60; k < 100; k += 5) {
        for (const std::int64_t size : {1, 8, 33}) expect_classifier_agrees(mask, {0, 0, q, q + size, k, k + size + 2});
      }
    }
    EXPECT_EQ(mask.classify({0, 0, 5, 5, 0, 8}, nullptr), TileClass::none);
  }
  const MaskFunction prefix = builtin_mask("prefix").value();
  EXPECT_EQ(prefix.classify({0, 0, 0, 8, 24, 32}, nullptr), TileClass::none);
  EXPECT_EQ(prefix.classify({0, 0, 0, 8, 0, 24}, nullptr), TileClass::full);
  EXPECT_EQ(prefix.classify({0, 0, 24, 32, 24, 32}, nullptr), TileClass::partial);
  EXPECT_EQ(builtin_mask("checkerboard")->classify, nullptr);
}

TEST(Version, IsThatOfTheHeader) {
  EXPECT_EQ(std::string(version()),
            std::to_string(kVersionMajor) + "." + std::to_string(kVersionMinor) + "." + std::to_string(kVersionPatch));
  const std::string info = build_info();
  for (const char* key : {"version: ", "compiler: ", "build type: ", "instruction sets:", "OpenMP: ", "Highway: "}) {
    EXPECT_NE(info.find(key), std::string::npos) << key;
  }
}

}  // namespace
}  // namespace tessera
