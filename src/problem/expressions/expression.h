// SPDX-License-Identifier: Apache-2.0
// A score or a mask as an expression graph: straight-line steps, each of earlier ones. Python writes them down
// (python/tessera/expressions); the CPU's kernels run them on tiles, the oracle on single elements, and intervals of
// them classify tiles.
//
// The text form: steps separated by ";", operands by the numbers of their steps, in front of the results:
//   const.f 0x1.8p+1 | const.i 5 | const.b 1     a constant: fp32 (hexadecimal, inf, nan), int64, truth
//   score | batch | head | query | key           inputs: fp32, and positions in int64
//   load T i j …                                 an element of extra tensor T: fp32, or int64 of an integer tensor
//   OP a …                                       see kNames in expression.cpp
//   value N                                      the last but one: the result, fp32 of a score, truth of a mask
//   derivative N                                 perhaps: d value / d score
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/callable.h"

namespace tessera::detail {

enum class ExpressionType : std::uint8_t { real, integer, truth };

enum class ExpressionOp : std::uint8_t {
  constant,
  score,
  batch,
  head,
  query,
  key,
  load,
  to_real,     // the nearest
  to_integer,  // towards 0
  negate,
  absolute,
  invert,  // of a truth, or all bits of an integer
  floor,
  ceil,
  trunc,
  exp,
  log,
  sqrt,
  tanh,
  sin,
  cos,
  add,  // integers wrap
  subtract,
  multiply,
  divide,     // integers: rounded to −∞, by 0 it is 0
  remainder,  // with the divisor's sign; of integers by 0 it is 0
  minimum,    // NaN passes through
  maximum,
  power,
  bit_and,  // of truths too
  bit_or,
  bit_xor,
  shift_left,  // by the second operand's lowest 6 bits
  shift_right,
  less,
  less_equal,
  equal,
  not_equal,
  select,
};

/// What a step's value changes with, besides the sequence: bits.
inline constexpr std::uint8_t kChangesWithQuery = 1;
inline constexpr std::uint8_t kChangesWithKey = 2;

struct ExpressionStep {
  ExpressionOp op = ExpressionOp::constant;
  ExpressionType type = ExpressionType::real;     // of the value
  ExpressionType operand = ExpressionType::real;  // of the last operand, which is that of all but a select's first
  std::uint8_t operands = 0;
  std::uint8_t axes = 0;  // kChangesWith…; a score changes with both, a head with the query's row
  bool in_value = false;  // whether the value needs it, or the derivative alone
  std::int16_t tensor = -1;
  std::uint16_t from[4] = {};
  double real = 0.0;  // constants
  std::int64_t integer = 0;
};

struct Expression {
  static constexpr int kMostSteps = 256;

  std::vector<ExpressionStep> steps;
  int value = -1;
  int derivative = -1;  // −1: none

  /// Throws Error{invalid_argument} about "program" for a text that is none, or whose result is not of `result`.
  static Expression parse(std::string_view text, const std::vector<ExtraTensor>& extras, ExpressionType result);

  /// In double precision, element by element. `which`: value or derivative.
  [[nodiscard]] double real_at(int which, double score, const ScorePoint& at, const Extras& extras) const;
  [[nodiscard]] bool truth_at(const ScorePoint& at, const Extras& extras) const;
  /// By intervals: never none of a tile that shows a key, never full of one that hides one.
  [[nodiscard]] TileClass classify(const TileBounds& tile, const Extras& extras) const;
};

/// Integers as every backend computes with them: they wrap, and a division by 0 gives 0.
constexpr std::int64_t wrapped_add(std::int64_t a, std::int64_t b) noexcept {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}
constexpr std::int64_t wrapped_subtract(std::int64_t a, std::int64_t b) noexcept {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}
constexpr std::int64_t wrapped_multiply(std::int64_t a, std::int64_t b) noexcept {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}
constexpr std::int64_t wrapped_shift_left(std::int64_t a, std::int64_t by) noexcept {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) << (by & 63));
}
constexpr std::int64_t floor_divide(std::int64_t a, std::int64_t b) noexcept {
  if (b == 0) return 0;
  if (b == -1) return wrapped_subtract(0, a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
constexpr std::int64_t floor_remainder(std::int64_t a, std::int64_t b) noexcept {
  if (b == 0 || b == -1) return 0;
  const std::int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
/// A float without its fraction; the nearest of 64 bits beyond them, and 0 of NaN.
constexpr std::int64_t to_integer(double value) noexcept {
  if (value != value) return 0;
  if (value >= 9223372036854775808.0) return INT64_MAX;
  if (value <= -9223372036854775808.0) return INT64_MIN;
  return static_cast<std::int64_t>(value);
}

}  // namespace tessera::detail
