// SPDX-License-Identifier: Apache-2.0
// A score or a mask as a straight-line program: each step is computed from earlier ones. Python writes it
// (python/tessera/expressions). The CPU's kernels run it on tiles, the oracle runs it on single elements, and interval
// arithmetic on it classifies tiles.
//
// The text form: steps and then results, separated by ";". Operands are the numbers of earlier steps.
//   const.f 0x1.8p+1 | const.i 5 | const.b 1     a constant: fp32 (hexadecimal, inf, nan), int64, truth
//   score | batch | head | query | key           inputs: fp32, and positions in int64
//   load T i j …                                 an element of extra tensor T: fp32, or int64 of an integer tensor
//   OP a …                                       see kNames in expression.cpp
//   value N                                      the result: fp32 of a score, truth of a mask
//   derivative N                                 optional, of a score: d value / d score
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
  to_real,     // rounds to nearest
  to_integer,  // rounds towards 0
  negate,
  absolute,
  invert,  // negates a truth, or all bits of an integer
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
  divide,     // integers: rounds to −∞; 0 for a divisor of 0
  remainder,  // has the divisor's sign; integers: 0 for a divisor of 0
  minimum,    // passes NaN on
  maximum,
  power,
  bit_and,  // of truths too
  bit_or,
  bit_xor,
  shift_left,  // shifts by the second operand's lowest 6 bits
  shift_right,
  less,
  less_equal,
  equal,
  not_equal,
  select,
};

/// Bits for what a step's value depends on, besides the sequence.
inline constexpr std::uint8_t kChangesWithQuery = 1;
inline constexpr std::uint8_t kChangesWithKey = 2;

struct ExpressionStep {
  ExpressionOp op = ExpressionOp::constant;
  ExpressionType type = ExpressionType::real;     // of the value
  ExpressionType operand = ExpressionType::real;  // of the operands, except the condition of a select
  std::uint8_t operands = 0;
  std::uint8_t axes = 0;  // kChangesWith…; a score depends on both, the head counts as the query's
  bool in_value = false;  // the value needs this step; else at most the derivative does
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

  /// Throws Error{invalid_argument} about "program" for a text that is malformed, or that has a result of another type
  /// than `result`.
  static Expression parse(std::string_view text, const std::vector<ExtraTensor>& extras, ExpressionType result);

  /// One element in double precision. `which`: value or derivative.
  [[nodiscard]] double real_at(int which, double score, const ScorePoint& at, const Extras& extras) const;
  [[nodiscard]] bool truth_at(const ScorePoint& at, const Extras& extras) const;
  /// By interval arithmetic. `none` and `full` are certain; a tile that is `partial` may in fact be none or full.
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
/// A float truncated towards 0. Values beyond 64 bits saturate; NaN gives 0.
constexpr std::int64_t to_integer(double value) noexcept {
  if (value != value) return 0;
  if (value >= 9223372036854775808.0) return INT64_MAX;
  if (value <= -9223372036854775808.0) return INT64_MIN;
  return static_cast<std::int64_t>(value);
}

}  // namespace tessera::detail
