// SPDX-License-Identifier: Apache-2.0
// Classifies a whole tile of a mask by interval arithmetic (Moore 1966): every step gets bounds that hold for all
// elements of the tile. Bounds may be wider than the values, but never narrower. So a tile that is found full or empty
// is so; one that is found partial may be full, empty or partial.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "problem/expressions/expression.h"

namespace tessera::detail {
namespace {

using Op = ExpressionOp;
using Type = ExpressionType;

constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// The most elements of a tensor that are read for one step of one tile. If there are more, the bounds are unknown.
constexpr std::int64_t kMostLooks = 4096;

__extension__ using Wide = __int128;

/// Bounds of a step: [low, high] of an integer or a truth; [real_low, real_high] of a real, which may also be NaN if
/// `nan`. Members have no initial values, because every tile has an array of these.
struct Interval {
  std::int64_t low, high;
  double real_low, real_high;
  bool nan;

  [[nodiscard]] bool single() const { return low == high; }
  [[nodiscard]] bool always() const { return low != 0; }  // of truths
  [[nodiscard]] bool never() const { return high == 0; }
};

Interval unknown() { return {kLowest, kHighest, -kInfinity, kInfinity, true}; }
Interval integers(std::int64_t low, std::int64_t high) {
  Interval found = unknown();
  found.low = low;
  found.high = high;
  return found;
}
Interval truth(bool may_be_false, bool may_be_true) { return integers(may_be_false ? 0 : 1, may_be_true ? 1 : 0); }
Interval unknown_truth() { return truth(true, true); }
Interval unknown_of(Type type) { return type == Type::truth ? unknown_truth() : unknown(); }

/// Bounds of an integer result. If one of them does not fit in 64 bits, the result may have wrapped to any value.
Interval wide(Wide low, Wide high) {
  if (low < kLowest || high > kHighest) return unknown();
  return integers(static_cast<std::int64_t>(low), static_cast<std::int64_t>(high));
}

/// fp32 rounds a result up or down from the double, so the bounds are moved outwards by one fp32 number.
Interval reals(double low, double high, bool nan) {
  if (low != low || high != high) return unknown();
  Interval found = unknown();
  found.real_low =
      static_cast<double>(std::nextafter(static_cast<float>(low), -std::numeric_limits<float>::infinity()));
  found.real_high =
      static_cast<double>(std::nextafter(static_cast<float>(high), std::numeric_limits<float>::infinity()));
  found.nan = nan;
  return found;
}

Interval of_product(Wide a, Wide b, Wide c, Wide d) { return wide(std::min({a, b, c, d}), std::max({a, b, c, d})); }

Interval divided(const Interval& a, const Interval& b) {
  if (b.low <= 0 && b.high >= 0) return unknown();
  if (b.low == -1 || b.high == -1) return unknown();  // the smallest integer by −1 wraps
  const std::int64_t q[] = {floor_divide(a.low, b.low), floor_divide(a.low, b.high), floor_divide(a.high, b.low),
                            floor_divide(a.high, b.high)};
  return integers(*std::min_element(q, q + 4), *std::max_element(q, q + 4));
}

Interval remainder(const Interval& a, const Interval& b) {
  if (b.low <= 0) return unknown();
  if (b.single() && floor_divide(a.low, b.low) == floor_divide(a.high, b.low)) {
    return integers(floor_remainder(a.low, b.low), floor_remainder(a.high, b.low));
  }
  const bool inside = a.low >= 0 && a.high < b.low;
  return inside ? a : integers(0, b.high - 1);
}

Interval shifted_left(const Interval& a, const Interval& b) {
  if (!b.single() || b.low < 0 || b.low > 62) return unknown();
  return wide(Wide{a.low} * (Wide{1} << b.low), Wide{a.high} * (Wide{1} << b.low));
}

Interval bits(Op op, const Interval& a, const Interval& b) {
  if (a.low < 0 || b.low < 0) {
    // The result has only bits of the operand that is not negative.
    if (op == Op::bit_and && (a.low >= 0 || b.low >= 0)) return integers(0, a.low >= 0 ? a.high : b.high);
    return unknown();
  }
  if (a.single() && b.single()) {
    const std::int64_t value = op == Op::bit_and ? a.low & b.low : (op == Op::bit_or ? a.low | b.low : a.low ^ b.low);
    return integers(value, value);
  }
  if (op == Op::bit_and) return integers(0, std::min(a.high, b.high));
  const std::int64_t both = a.high | b.high;
  std::int64_t all = 1;  // the smallest 2^n − 1 that is not below either
  while (all < both) all = all > kHighest / 2 ? kHighest : 2 * all + 1;
  return integers(op == Op::bit_or ? std::max(a.low, b.low) : 0, all);
}

Interval of_integers(Op op, const Interval& a, const Interval& b) {
  switch (op) {
    case Op::negate:
      return wide(-Wide{a.high}, -Wide{a.low});
    case Op::absolute:
      if (a.low >= 0) return a;
      if (a.high <= 0) return wide(-Wide{a.high}, -Wide{a.low});
      return wide(0, std::max(-Wide{a.low}, Wide{a.high}));
    case Op::invert:
      return integers(~a.high, ~a.low);
    case Op::add:
      return wide(Wide{a.low} + b.low, Wide{a.high} + b.high);
    case Op::subtract:
      return wide(Wide{a.low} - b.high, Wide{a.high} - b.low);
    case Op::multiply:
      return of_product(Wide{a.low} * b.low, Wide{a.low} * b.high, Wide{a.high} * b.low, Wide{a.high} * b.high);
    case Op::divide:
      return divided(a, b);
    case Op::remainder:
      return remainder(a, b);
    case Op::minimum:
      return integers(std::min(a.low, b.low), std::min(a.high, b.high));
    case Op::maximum:
      return integers(std::max(a.low, b.low), std::max(a.high, b.high));
    case Op::shift_left:
      return shifted_left(a, b);
    case Op::shift_right:
      if (!b.single()) return unknown();
      return integers(a.low >> (b.low & 63), a.high >> (b.low & 63));
    default:
      return bits(op, a, b);
  }
}

Interval of_truths(Op op, const Interval& a, const Interval& b) {
  switch (op) {
    case Op::invert:
      return truth(a.high != 0, a.low == 0);
    case Op::bit_and:
      return integers(std::min(a.low, b.low), std::min(a.high, b.high));
    case Op::bit_or:
      return integers(std::max(a.low, b.low), std::max(a.high, b.high));
    default:
      if (a.single() && b.single()) return integers(a.low ^ b.low, a.low ^ b.low);
      return unknown_truth();
  }
}

Interval of_reals(Op op, const Interval& a, const Interval& b) {
  const bool nan = a.nan || b.nan;
  const bool finite = std::isfinite(a.real_low) && std::isfinite(a.real_high) && std::isfinite(b.real_low) &&
                      std::isfinite(b.real_high);
  switch (op) {
    case Op::negate:
      return reals(-a.real_high, -a.real_low, a.nan);
    case Op::absolute: {
      const double most = std::max(std::fabs(a.real_low), std::fabs(a.real_high));
      const bool around = a.real_low <= 0.0 && a.real_high >= 0.0;
      return reals(around ? 0.0 : std::min(std::fabs(a.real_low), std::fabs(a.real_high)), most, a.nan);
    }
    case Op::floor:
      return reals(std::floor(a.real_low), std::floor(a.real_high), a.nan);
    case Op::ceil:
      return reals(std::ceil(a.real_low), std::ceil(a.real_high), a.nan);
    case Op::trunc:
      return reals(std::trunc(a.real_low), std::trunc(a.real_high), a.nan);
    case Op::minimum:
      return reals(std::min(a.real_low, b.real_low), std::min(a.real_high, b.real_high), nan);
    case Op::maximum:
      return reals(std::max(a.real_low, b.real_low), std::max(a.real_high, b.real_high), nan);
    case Op::add:
      return finite ? reals(a.real_low + b.real_low, a.real_high + b.real_high, nan) : unknown();
    case Op::subtract:
      return finite ? reals(a.real_low - b.real_high, a.real_high - b.real_low, nan) : unknown();
    case Op::multiply: {
      if (!finite) return unknown();
      const double p[] = {a.real_low * b.real_low, a.real_low * b.real_high, a.real_high * b.real_low,
                          a.real_high * b.real_high};
      return reals(*std::min_element(p, p + 4), *std::max_element(p, p + 4), nan);
    }
    default:
      return unknown();
  }
}

Interval compared(Op op, Type type, const Interval& a, const Interval& b) {
  const bool real = type == Type::real;
  const bool nan = real && (a.nan || b.nan);  // then comparisons are false, except ≠
  const bool below = real ? a.real_high < b.real_low : a.high < b.low;
  const bool not_above = real ? a.real_high <= b.real_low : a.high <= b.low;
  const bool above = real ? a.real_low > b.real_high : a.low > b.high;
  const bool not_below = real ? a.real_low >= b.real_high : a.low >= b.high;
  const bool same = !real && a.single() && b.single() && a.low == b.low;
  switch (op) {
    case Op::less:
      return truth(!below || nan, !not_below);
    case Op::less_equal:
      return truth(!not_above || nan, !above);
    case Op::equal:
      return truth(!same || nan, !below && !above);
    default:
      return truth(!(below || above), !same);
  }
}

using Intervals = std::array<Interval, Expression::kMostSteps>;

/// Widens `found` by the bounds of `count` neighbouring integers.
template <class T>
void look_at(const T* from, std::int64_t count, Interval& found) {
  T low = *from;
  T high = *from;
  for (std::int64_t i = 1; i < count; ++i) {
    low = from[i] < low ? from[i] : low;
    high = from[i] > high ? from[i] : high;
  }
  found.low = std::min<std::int64_t>(found.low, low);
  found.high = std::max<std::int64_t>(found.high, high);
}

/// Bounds of the elements of a tensor that a load may read.
class Looks {
 public:
  Looks(const ExpressionStep& step, const Extras& extras, const Intervals& known)
      : step_(step), tensor_(extras.tensor(step.tensor)), extras_(extras) {
    for (int i = 0; i < step.operands; ++i) {
      const Interval& index = known[step.from[i]];
      const std::int64_t last = tensor_.shape[static_cast<std::size_t>(i)] - 1;
      low_[i] = std::clamp<std::int64_t>(index.low, 0, last);
      high_[i] = std::clamp<std::int64_t>(index.high, 0, last);
      const std::int64_t span = high_[i] - low_[i] + 1;
      count_ = span > kMostLooks ? kMostLooks + 1 : std::min(count_ * span, kMostLooks + 1);
    }
  }

  Interval bounds() const {
    if (count_ > kMostLooks) return unknown();
    std::int64_t at[4] = {low_[0], low_[1], low_[2], low_[3]};
    Interval found{kHighest, kLowest, kInfinity, -kInfinity, false};
    do {
      look(at, found);
    } while (next(at));
    return found;
  }

 private:
  // Reads along the last dimension, which is contiguous.
  void look(const std::int64_t* at, Interval& found) const {
    const int last = step_.operands - 1;
    const std::int64_t count = last < 0 ? 1 : high_[last] - low_[last] + 1;
    std::int64_t offset = 0;
    for (int i = 0; i <= last; ++i) offset += at[i] * tensor_.strides[static_cast<std::size_t>(i)];
    switch (tensor_.dtype) {
      case DType::int32:
        return look_at(tensor_.as<std::int32_t>() + offset, count, found);
      case DType::int64:
        return look_at(tensor_.as<std::int64_t>() + offset, count, found);
      case DType::uint8:
        return look_at(tensor_.as<std::uint8_t>() + offset, count, found);
      default:
        break;
    }
    std::int64_t each[4] = {at[0], at[1], at[2], at[3]};
    for (std::int64_t i = 0; i < count; ++i, ++each[std::max(last, 0)]) {
      const double element = extras_(step_.tensor, each[0], each[1], each[2], each[3]);
      found.nan |= element != element;
      found.real_low = std::min(found.real_low, element != element ? -kInfinity : element);
      found.real_high = std::max(found.real_high, element != element ? kInfinity : element);
    }
  }

  // Moves on the indices of all dimensions but the last; false at the end.
  bool next(std::int64_t* at) const {
    for (int i = step_.operands - 2; i >= 0; --i) {
      if (++at[i] <= high_[i]) return true;
      at[i] = low_[i];
    }
    return false;
  }

  const ExpressionStep& step_;
  const Tensor& tensor_;
  const Extras& extras_;
  std::int64_t low_[4] = {}, high_[4] = {};
  std::int64_t count_ = 1;
};

Interval interval_of(const ExpressionStep& step, const Intervals& known, const TileBounds& tile, const Extras& extras) {
  const Interval& a = known[step.from[0]];
  const Interval& b = known[step.from[1]];
  switch (step.op) {
    case Op::constant:
      if (step.type != Type::real) return integers(step.integer, step.integer);
      return reals(step.real, step.real, step.real != step.real);
    case Op::batch:
      return integers(tile.batch, tile.batch);
    case Op::head:
      return integers(tile.head, tile.head);
    case Op::query:
      return integers(tile.query_begin, tile.query_end - 1);
    case Op::key:
      return integers(tile.key_begin, tile.key_end - 1);
    case Op::load:
      return Looks(step, extras, known).bounds();
    case Op::to_real:
      return reals(static_cast<double>(a.low), static_cast<double>(a.high), false);
    case Op::to_integer:
      if (step.operand == Type::truth) return a;
      return a.nan ? unknown() : integers(to_integer(a.real_low), to_integer(a.real_high));
    case Op::select: {
      const Interval& c = known[step.from[2]];
      if (a.always()) return b;
      if (a.never()) return c;
      Interval either = integers(std::min(b.low, c.low), std::max(b.high, c.high));
      either.real_low = std::min(b.real_low, c.real_low);
      either.real_high = std::max(b.real_high, c.real_high);
      either.nan = b.nan || c.nan;
      return either;
    }
    case Op::less:
    case Op::less_equal:
    case Op::equal:
    case Op::not_equal:
      return compared(step.op, step.operand, a, b);
    case Op::score:
      return unknown();
    default:
      if (step.type == Type::real) return of_reals(step.op, a, b);
      if (step.type == Type::truth) return of_truths(step.op, a, b);
      return of_integers(step.op, a, b);
  }
}

}  // namespace

TileClass Expression::classify(const TileBounds& tile, const Extras& extras) const {
  if (tile.query_begin >= tile.query_end || tile.key_begin >= tile.key_end) return TileClass::none;
  Intervals known;
  for (std::size_t i = 0; i <= static_cast<std::size_t>(value); ++i) {
    known[i] = steps[i].in_value ? interval_of(steps[i], known, tile, extras) : unknown_of(steps[i].type);
  }
  const Interval& result = known[static_cast<std::size_t>(value)];
  if (result.never()) return TileClass::none;
  return result.always() ? TileClass::full : TileClass::partial;
}

}  // namespace tessera::detail
