// SPDX-License-Identifier: Apache-2.0
// Evaluates an expression at one element in double precision, for the oracle. Of its arithmetic, only that of integers
// is shared with the CPU's kernels.
#include <algorithm>
#include <array>
#include <cmath>

#include "problem/expressions/expression.h"

namespace tessera::detail {
namespace {

using Op = ExpressionOp;
using Type = ExpressionType;

struct Value {
  double real = 0.0;
  std::int64_t integer = 0;  // also of a truth
};

double remainder_of(double a, double b) {
  const double rest = std::fmod(a, b);
  return rest != 0.0 && (rest < 0.0) != (b < 0.0) ? rest + b : rest;
}

double of_reals(Op op, double a, double b) {
  switch (op) {
    case Op::negate:
      return -a;
    case Op::absolute:
      return std::fabs(a);
    case Op::floor:
      return std::floor(a);
    case Op::ceil:
      return std::ceil(a);
    case Op::trunc:
      return std::trunc(a);
    case Op::exp:
      return std::exp(a);
    case Op::log:
      return std::log(a);
    case Op::sqrt:
      return std::sqrt(a);
    case Op::tanh:
      return std::tanh(a);
    case Op::sin:
      return std::sin(a);
    case Op::cos:
      return std::cos(a);
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return a / b;
    case Op::remainder:
      return remainder_of(a, b);
    case Op::minimum:
      return a != a || a < b ? a : b;
    case Op::maximum:
      return a != a || a > b ? a : b;
    default:
      return std::pow(a, b);
  }
}

std::int64_t of_integers(Op op, Type type, std::int64_t a, std::int64_t b) {
  switch (op) {
    case Op::negate:
      return wrapped_subtract(0, a);
    case Op::absolute:
      return a < 0 ? wrapped_subtract(0, a) : a;
    case Op::invert:
      return type == Type::truth ? 1 - a : ~a;
    case Op::add:
      return wrapped_add(a, b);
    case Op::subtract:
      return wrapped_subtract(a, b);
    case Op::multiply:
      return wrapped_multiply(a, b);
    case Op::divide:
      return floor_divide(a, b);
    case Op::remainder:
      return floor_remainder(a, b);
    case Op::minimum:
      return std::min(a, b);
    case Op::maximum:
      return std::max(a, b);
    case Op::bit_and:
      return a & b;
    case Op::bit_or:
      return a | b;
    case Op::bit_xor:
      return a ^ b;
    case Op::shift_left:
      return wrapped_shift_left(a, b);
    default:
      return a >> (b & 63);
  }
}

template <class T>
bool compared(Op op, T a, T b) {
  switch (op) {
    case Op::less:
      return a < b;
    case Op::less_equal:
      return a <= b;
    case Op::equal:
      return a == b;
    default:
      return a != b;
  }
}

using Values = std::array<Value, Expression::kMostSteps>;

Value loaded(const ExpressionStep& step, const Values& values, const Extras& extras) {
  std::int64_t at[4] = {};
  for (int i = 0; i < step.operands; ++i) at[i] = values[step.from[i]].integer;
  const Tensor& tensor = extras.tensor(step.tensor);
  if (tensor.dtype == DType::int64) {  // a double holds 53 bits
    std::int64_t offset = 0;
    for (int i = 0; i < step.operands; ++i) {
      const auto d = static_cast<std::size_t>(i);
      offset += std::clamp<std::int64_t>(at[i], 0, tensor.shape[d] - 1) * tensor.strides[d];
    }
    return {0.0, tensor.as<std::int64_t>()[offset]};
  }
  const double element = extras(step.tensor, at[0], at[1], at[2], at[3]);
  return {element, step.type == Type::integer ? static_cast<std::int64_t>(element) : 0};
}

Value value_of(const ExpressionStep& step, const Values& values, double score, const ScorePoint& at,
               const Extras& extras) {
  const Value& a = values[step.from[0]];
  const Value& b = values[step.from[1]];
  switch (step.op) {
    case Op::constant:
      return {step.real, step.integer};
    case Op::score:
      return {score, 0};
    case Op::batch:
      return {0.0, at.batch};
    case Op::head:
      return {0.0, at.head};
    case Op::query:
      return {0.0, at.query};
    case Op::key:
      return {0.0, at.key};
    case Op::load:
      return loaded(step, values, extras);
    case Op::to_real:
      return {static_cast<double>(a.integer), 0};
    case Op::to_integer:
      return {0.0, step.operand == Type::truth ? a.integer : to_integer(a.real)};
    case Op::select:
      return a.integer != 0 ? b : values[step.from[2]];
    case Op::less:
    case Op::less_equal:
    case Op::equal:
    case Op::not_equal:
      return {0.0,
              step.operand == Type::real ? compared(step.op, a.real, b.real) : compared(step.op, a.integer, b.integer)};
    default:
      if (step.type == Type::real) return {of_reals(step.op, a.real, b.real), 0};
      return {0.0, of_integers(step.op, step.type, a.integer, b.integer)};
  }
}

}  // namespace

double Expression::real_at(int which, double score, const ScorePoint& at, const Extras& extras) const {
  Values values;
  const auto count = static_cast<std::size_t>(which) + 1;
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(steps[i], values, score, at, extras);
  return values[count - 1].real;
}

bool Expression::truth_at(const ScorePoint& at, const Extras& extras) const {
  Values values;
  const auto count = static_cast<std::size_t>(value) + 1;
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(steps[i], values, 0.0, at, extras);
  return values[count - 1].integer != 0;
}

}  // namespace tessera::detail
