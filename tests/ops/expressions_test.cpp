// SPDX-License-Identifier: Apache-2.0
// Programs of scores and masks on random graphs: the kernels of every instruction set against the evaluation element by
// element, and the classes of tiles against every element of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/scores/lane_program.h"
#include "cpu/simd/kernels.h"
#include "problem/expressions/expression.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::Expression;
using detail::ExpressionType;

/// Tensors that programs read: documents int32 (40), a table int64 (5, 7), bits uint8 (3), biases fp32 (4, 30).
class Captured {
 public:
  Captured() {
    for (std::size_t i = 0; i < documents_.size(); ++i) documents_[i] = static_cast<std::int32_t>(i / 7);
    for (std::size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<std::int64_t>(i * 5 % 11) - 4;
    for (std::size_t i = 0; i < biases_.size(); ++i) biases_[i] = std::sin(static_cast<float>(i));
    tensors_ = {Tensor::contiguous(documents_.data(), DType::int32, {40}),
                Tensor::contiguous(table_.data(), DType::int64, {5, 7}),
                Tensor::contiguous(bits_.data(), DType::uint8, {3}),
                Tensor::contiguous(biases_.data(), DType::fp32, {4, 30})};
  }
  [[nodiscard]] Extras extras() const { return {tensors_.data(), 4}; }
  [[nodiscard]] const Tensor* tensors() const { return tensors_.data(); }
  static std::vector<ExtraTensor> described() {
    return {{"a", DType::int32, 1}, {"b", DType::int64, 2}, {"c", DType::uint8, 1}, {"d", DType::fp32, 2}};
  }

 private:
  std::array<std::int32_t, 40> documents_{};
  std::array<std::int64_t, 35> table_{};
  std::array<std::uint8_t, 3> bits_ = {0, 1, 0};
  std::array<float, 120> biases_{};
  std::array<Tensor, 4> tensors_;
};

/// Random programs. Floats stay small and far from where rounding decides, so that fp32 and double agree.
class RandomProgram {
 public:
  explicit RandomProgram(unsigned seed) : random_(seed) {}

  std::string mask(int steps) {
    begin();
    for (int i = 0; i < steps; ++i) pick(3) == 0 ? add_truth() : add_integer();
    while (of('b').empty()) add_truth();
    return text_ + "value " + std::to_string(of('b').back());
  }

  std::string score(int steps) {
    begin();
    push("score", 'f');
    for (int i = 0; i < steps; ++i) {
      const int kind = pick(5);
      kind == 0 ? add_integer() : kind == 1 ? add_truth() : add_real();
    }
    const std::string last = std::to_string(of('f').back());
    return text_ + "value " + last + ";derivative " + one('f');
  }

 private:
  void begin() {
    text_.clear();
    types_.clear();
    for (const char* name : {"query", "key", "head", "batch"}) push(name, 'i');
  }
  int pick(int count) { return std::uniform_int_distribution<int>(0, count - 1)(random_); }
  void push(const std::string& step, char type) {
    text_ += step + ";";
    types_.push_back(type);
  }
  [[nodiscard]] std::vector<int> of(char type) const {
    std::vector<int> found;
    for (std::size_t i = 0; i < types_.size(); ++i) {
      if (types_[i] == type) found.push_back(static_cast<int>(i));
    }
    return found;
  }
  /// Any step of the type, later ones more likely.
  std::string one(char type) {
    const std::vector<int> known = of(type);
    const int last = static_cast<int>(known.size()) - 1;
    return std::to_string(known[static_cast<std::size_t>(std::max(pick(last + 1), pick(last + 1)))]);
  }
  std::string two(char type) { return one(type) + " " + one(type); }

  void add_integer() {
    switch (pick(8)) {
      case 0:
        return push("const.i " + std::to_string(pick(40) - 8), 'i');
      case 1:
        return push("load " + std::to_string(pick(2) * 2) + " " + one('i'), 'i');
      case 2:
        return push("load 1 " + two('i'), 'i');
      case 3: {
        static const char* const kUnary[] = {"neg", "abs", "not"};
        return push(std::string(kUnary[pick(3)]) + " " + one('i'), 'i');
      }
      case 4:
        if (!of('b').empty()) return push("select " + one('b') + " " + two('i'), 'i');
        [[fallthrough]];
      default: {
        static const char* const kBinary[] = {"add", "sub", "mul", "div", "mod", "min",
                                              "max", "and", "or",  "xor", "shr", "shl"};
        return push(std::string(kBinary[pick(12)]) + " " + two('i'), 'i');
      }
    }
  }
  void add_truth() {
    static const char* const kCompare[] = {"lt", "le", "eq", "ne"};
    static const char* const kJoin[] = {"and", "or", "xor"};
    if (of('b').empty() || pick(2) == 0) return push(std::string(kCompare[pick(4)]) + " " + two('i'), 'b');
    if (pick(4) == 0) return push("not " + one('b'), 'b');
    push(std::string(kJoin[pick(3)]) + " " + two('b'), 'b');
  }
  void add_real() {
    switch (pick(9)) {
      case 0:
        return push("const.f " + std::to_string(pick(33) - 16) + ".125", 'f');
      case 1:
        return push("load 3 " + two('i'), 'f');
      case 2:  // of an integer that fp32 holds
        push("const.i 1023", 'i');
        push("and " + one('i') + " " + std::to_string(types_.size() - 1), 'i');
        push("float " + std::to_string(types_.size() - 1), 'f');
        push("const.f 0x1p-9", 'f');
        return push("mul " + std::to_string(types_.size() - 2) + " " + std::to_string(types_.size() - 1), 'f');
      case 3:
        if (!of('b').empty()) return push("select " + one('b') + " " + two('f'), 'f');
        [[fallthrough]];
      case 4: {
        static const char* const kUnary[] = {"neg", "abs", "tanh"};
        return push(std::string(kUnary[pick(3)]) + " " + one('f'), 'f');
      }
      case 5: {  // functions of a number from −1 to 1
        static const char* const kSmall[] = {"exp", "sin", "cos"};
        push("tanh " + one('f'), 'f');
        return push(std::string(kSmall[pick(3)]) + " " + std::to_string(types_.size() - 1), 'f');
      }
      case 6: {  // of one from 1 to 2, and a quotient by it
        push("tanh " + one('f'), 'f');
        const int small = static_cast<int>(types_.size()) - 1;
        push("mul " + std::to_string(small) + " " + std::to_string(small), 'f');
        push("const.f 1", 'f');
        push("add " + std::to_string(small + 1) + " " + std::to_string(small + 2), 'f');
        const std::string positive = std::to_string(small + 3);
        switch (pick(4)) {
          case 0:
            return push("log " + positive, 'f');
          case 1:
            return push("sqrt " + positive, 'f');
          case 2:
            return push("pow " + positive + " " + std::to_string(small), 'f');
          default:
            return push("div " + one('f') + " " + positive, 'f');
        }
      }
      default: {
        static const char* const kBinary[] = {"add", "sub", "min", "max"};
        return push(std::string(kBinary[pick(4)]) + " " + two('f'), 'f');
      }
    }
  }

  std::mt19937 random_;
  std::string text_;
  std::string types_;
};

/// A tile with heads and positions in any order, as heads of a group in one tile have them.
struct Tile {
  std::int64_t queries, keys;
  std::vector<std::int64_t> query_position, key_position;
  std::vector<std::int32_t> head;
  std::vector<float> s;

  Tile(std::int64_t rows, std::int64_t columns, std::mt19937& random) : queries(rows), keys(columns) {
    const auto number = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
    for (std::int64_t i = 0; i < rows; ++i) {
      query_position.push_back(number(-5, 60));
      head.push_back(number(0, 5));
    }
    const int first = number(-5, 50);
    for (std::int64_t j = 0; j < columns; ++j) key_position.push_back(first + j);
    for (std::int64_t i = 0; i < rows * columns; ++i) s.push_back(static_cast<float>(number(-400, 400)) * 0.01F);
  }
  /// `s` holds the transposed tile where lanes are queries.
  [[nodiscard]] cpu::LaneTile lanes(bool by_query, float* scores, const Tensor* tensors) const {
    return {scores,
            by_query ? queries : keys,
            by_query ? keys : queries,
            by_query ? queries : keys,
            by_query ? key_position.data() : query_position.data(),
            by_query ? query_position.data() : key_position.data(),
            head.data(),
            by_query,
            kBatch,
            kHeadOffset,
            tensors};
  }
  [[nodiscard]] std::size_t at(bool by_query, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(by_query ? j * queries + i : i * keys + j);
  }
  [[nodiscard]] ScorePoint point(std::int64_t i, std::int64_t j) const {
    const auto row = static_cast<std::size_t>(i);
    return {kBatch, head[row] + kHeadOffset, query_position[row], key_position[static_cast<std::size_t>(j)]};
  }
  static constexpr std::int64_t kBatch = 3;
  static constexpr std::int64_t kHeadOffset = 2;
};

void expect_near(double got, double want, const std::string& text) {
  if (std::isinf(want) || std::isinf(got) || std::isnan(want)) {
    EXPECT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << got << " " << want << " " << text;
  } else {
    EXPECT_NEAR(got, want, 2e-4 * std::max(1.0, std::fabs(want))) << text;
  }
}

class Programs : public testing::TestWithParam<std::string> {};

TEST_P(Programs, ScoresOfTilesAreThoseOfElements) {
  const cpu::Kernels& kernels = cpu::kernels_for(GetParam());
  const Captured captured;
  std::mt19937 random(7);
  RandomProgram programs(11);
  const auto lanes = std::make_unique<cpu::LaneProgram>();
  for (int trial = 0; trial < 400; ++trial) {
    const std::string text = programs.score(4 + trial % 20);
    const Expression e = Expression::parse(text, Captured::described(), ExpressionType::real);
    const bool by_query = trial % 2 == 0;
    cpu::make_lane_program(e, by_query, *lanes);
    ASSERT_TRUE(lanes->usable) << text;
    Tile tile(1 + trial % 70, 1 + trial * 7 % 90, random);
    std::vector<float> got = tile.s, slope(tile.s.size(), 2.0F);
    kernels.run_score(*lanes, tile.lanes(by_query, got.data(), captured.tensors()), slope.data());
    std::vector<float> alone = tile.s;  // without the derivative
    kernels.run_score(*lanes, tile.lanes(by_query, alone.data(), captured.tensors()), nullptr);
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      for (std::int64_t j = 0; j < tile.keys; ++j) {
        const std::size_t at = tile.at(by_query, i, j);
        const double score = tile.s[at];
        expect_near(got[at], e.real_at(e.value, score, tile.point(i, j), captured.extras()), text);
        expect_near(slope[at], 2 * e.real_at(e.derivative, score, tile.point(i, j), captured.extras()), text);
        EXPECT_EQ(std::isnan(got[at]) ? 0.0F : got[at], std::isnan(alone[at]) ? 0.0F : alone[at]) << text;
      }
    }
    if (HasFailure()) return;
  }
}

TEST_P(Programs, MasksOfTilesAreThoseOfElements) {
  const cpu::Kernels& kernels = cpu::kernels_for(GetParam());
  const Captured captured;
  std::mt19937 random(8);
  RandomProgram programs(12);
  const auto lanes = std::make_unique<cpu::LaneProgram>();
  for (int trial = 0; trial < 600; ++trial) {
    const std::string text = programs.mask(4 + trial % 30);
    const Expression e = Expression::parse(text, Captured::described(), ExpressionType::truth);
    const bool by_query = trial % 2 == 0;
    cpu::make_lane_program(e, by_query, *lanes);
    ASSERT_TRUE(lanes->usable) << text;
    Tile tile(1 + trial % 70, 1 + trial * 7 % 90, random);
    std::vector<float> got = tile.s;
    kernels.run_mask(*lanes, tile.lanes(by_query, got.data(), captured.tensors()));
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      for (std::int64_t j = 0; j < tile.keys; ++j) {
        const std::size_t at = tile.at(by_query, i, j);
        const bool visible = e.truth_at(tile.point(i, j), captured.extras());
        ASSERT_EQ(got[at], visible ? tile.s[at] : -std::numeric_limits<float>::infinity()) << text;
      }
    }
  }
}

// Doubles hold integers up to 2^51, which products of 60 and 2^46 are beyond.
TEST_P(Programs, DivisionsOfLargeNumbers) {
  const cpu::Kernels& kernels = cpu::kernels_for(GetParam());
  const Captured captured;
  std::mt19937 random(15);
  const auto lanes = std::make_unique<cpu::LaneProgram>();
  for (const std::int64_t factor :
       {std::int64_t{1}, std::int64_t{1} << 30, std::int64_t{1} << 45, std::int64_t{1} << 46, std::int64_t{1} << 56}) {
    for (const std::int64_t by : {std::int64_t{3}, std::int64_t{7}, std::int64_t{1000003}, (std::int64_t{1} << 40) + 1,
                                  (std::int64_t{1} << 51) + 1, std::int64_t{-7}}) {
      for (const char* operation : {"div", "mod"}) {
        const std::string text = "query;key;const.i " + std::to_string(factor) + ";mul 0 2;add 3 1;const.i " +
                                 std::to_string(by) + ";" + operation +
                                 " 4 5;const.i 1023;and 6 7;float 8;value 9;derivative 9";
        const Expression e = Expression::parse(text, Captured::described(), ExpressionType::real);
        cpu::make_lane_program(e, false, *lanes);
        Tile tile(40, 90, random);
        std::vector<float> got = tile.s;
        kernels.run_score(*lanes, tile.lanes(false, got.data(), captured.tensors()), nullptr);
        for (std::int64_t i = 0; i < tile.queries; ++i) {
          for (std::int64_t j = 0; j < tile.keys; ++j) {
            ASSERT_EQ(got[tile.at(false, i, j)], e.real_at(e.value, 0, tile.point(i, j), captured.extras())) << text;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, Programs, testing::ValuesIn(cpu::usable_isas()),
                         [](const auto& isa) { return isa.param; });

TEST(Classify, IsRightAboutEveryElement) {
  const Captured captured;
  std::mt19937 random(9);
  RandomProgram programs(13);
  int full = 0, none = 0;
  for (int graph = 0; graph < 20000; ++graph) {
    const std::string text = programs.mask(3 + graph % 12);
    const Expression e = Expression::parse(text, Captured::described(), ExpressionType::truth);
    for (int trial = 0; trial < 5; ++trial) {
      const auto number = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
      const std::int64_t query = number(-10, 50), key = number(-10, 50);
      const TileBounds tile{number(0, 3), number(0, 5), query, query + number(1, 9), key, key + number(1, 9)};
      bool any = false, all = true;
      for (std::int64_t i = tile.query_begin; i < tile.query_end; ++i) {
        for (std::int64_t j = tile.key_begin; j < tile.key_end; ++j) {
          const bool visible = e.truth_at({tile.batch, tile.head, i, j}, captured.extras());
          any |= visible;
          all &= visible;
        }
      }
      const TileClass found = e.classify(tile, captured.extras());
      ASSERT_TRUE(found != TileClass::none || !any) << text << " " << query << " " << key;
      ASSERT_TRUE(found != TileClass::full || all) << text << " " << query << " " << key;
      full += found == TileClass::full ? 1 : 0;
      none += found == TileClass::none ? 1 : 0;
    }
  }
  EXPECT_GT(full, 20000);
  EXPECT_GT(none, 20000);
}

TileClass class_of(const std::string& text, std::int64_t query, std::int64_t key) {
  const Captured captured;
  return Expression::parse(text, Captured::described(), ExpressionType::truth)
      .classify({0, 0, query, query + 8, key, key + 8}, captured.extras());
}

TEST(Classify, OnlyTrueEdgesArePartial) {
  const std::string causal = "query;key;le 1 0;value 2";
  EXPECT_EQ(class_of(causal, 8, 0), TileClass::full);
  EXPECT_EQ(class_of(causal, 7, 0), TileClass::full);
  EXPECT_EQ(class_of(causal, 6, 0), TileClass::partial);
  EXPECT_EQ(class_of(causal, 0, 7), TileClass::partial);
  EXPECT_EQ(class_of(causal, 0, 8), TileClass::none);
  const std::string documents = "query;key;const.i 16;div 0 2;div 1 2;eq 3 4;value 5";
  EXPECT_EQ(class_of(documents, 16, 24), TileClass::full);
  EXPECT_EQ(class_of(documents, 16, 32), TileClass::none);
  EXPECT_EQ(class_of(documents, 20, 28), TileClass::partial);
  const std::string loaded = "query;key;load 0 0;load 0 1;eq 2 3;value 4";  // documents of 7
  EXPECT_EQ(class_of(loaded, 0, 14), TileClass::none);
  EXPECT_EQ(class_of(loaded, 0, 7), TileClass::partial);
  EXPECT_EQ(class_of(loaded, 40, 48), TileClass::full);  // past the end of the tensor
}

TEST(Program, WhatCannotBeIsRefused) {
  for (const char* text : {"", "query", "query;value 0;query", "query;value 1", "key;value 0", "const.i x;value 0",
                           "const.b 2;value 0", "score;value 0", "query;key;lt 0 2;value 2", "query;add 0;value 1",
                           "query;frob 0;value 1", "load 9;value 0", "const.b 1;query;add 0 1;value 2",
                           "const.b 1;value 0;derivative 0", "const.b 1;value 0 0", "load 3 0 0;value 0"}) {
    EXPECT_THROW(Expression::parse(text, Captured::described(), ExpressionType::truth), Error) << text;
  }
  std::string large;
  for (int i = 0; i <= Expression::kMostSteps; ++i) large += "const.b 1;";
  EXPECT_THROW(Expression::parse(large + "value 0", {}, ExpressionType::truth), Error);
}

}  // namespace
}  // namespace tessera
