// SPDX-License-Identifier: Apache-2.0
// Computes a step of an expression on 64 lanes, by loops that the compiler vectorises. exp, log and tanh are
// polynomials. Included once per instruction set, after softmax-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

using ExprOp = detail::ExpressionOp;
using ExprType = detail::ExpressionType;
constexpr int kWide = kExpressionLanes;

struct alignas(64) LaneSlot {
  union {
    float real[kWide];
    std::int64_t integer[kWide];
    std::int32_t truth[kWide];  // 0 or 1
  };
};
HWY_INLINE float* lanes_of(LaneSlot& slot, float) { return slot.real; }
HWY_INLINE std::int64_t* lanes_of(LaneSlot& slot, std::int64_t) { return slot.integer; }
HWY_INLINE std::int32_t* lanes_of(LaneSlot& slot, std::int32_t) { return slot.truth; }

/// An operand: one number per lane, or one for all lanes.
template <class T>
struct Lanes {
  const T* at;
  bool single;
};

// Arithmetic with a tensor's values may give NaN with any payload, but the bf16 kernels keep only the default NaN.
HWY_INLINE float default_nan(float x) { return x == x ? x : std::numeric_limits<float>::quiet_NaN(); }

#define TESSERA_LANE_FUNCTION(name, T, R, value) \
  struct name {                                  \
    static HWY_INLINE R of(T a, T b) {           \
      (void)b;                                   \
      return value;                              \
    }                                            \
  };
#define TESSERA_INT(expression) static_cast<std::int64_t>(expression)
TESSERA_LANE_FUNCTION(RealNegate, float, float, -a)
TESSERA_LANE_FUNCTION(RealAbsolute, float, float, std::fabs(a))
TESSERA_LANE_FUNCTION(RealAdd, float, float, a + b)
TESSERA_LANE_FUNCTION(RealSubtract, float, float, a - b)
TESSERA_LANE_FUNCTION(RealMultiply, float, float, a* b)
TESSERA_LANE_FUNCTION(RealDivide, float, float, a / b)
TESSERA_LANE_FUNCTION(RealMinimum, float, float, ((a != a) | (a < b)) ? a : b)
TESSERA_LANE_FUNCTION(RealMaximum, float, float, ((a != a) | (a > b)) ? a : b)
TESSERA_LANE_FUNCTION(RealPower, float, float, std::pow(a, b))
TESSERA_LANE_FUNCTION(RealSin, float, float, std::sin(a))
TESSERA_LANE_FUNCTION(RealCos, float, float, std::cos(a))
TESSERA_LANE_FUNCTION(RealLess, float, std::int32_t, a < b ? 1 : 0)
TESSERA_LANE_FUNCTION(RealLessEqual, float, std::int32_t, a <= b ? 1 : 0)
TESSERA_LANE_FUNCTION(RealEqual, float, std::int32_t, a == b ? 1 : 0)
TESSERA_LANE_FUNCTION(RealNotEqual, float, std::int32_t, a != b ? 1 : 0)
TESSERA_LANE_FUNCTION(RealToInteger, float, std::int64_t, detail::to_integer(static_cast<double>(a)))
TESSERA_LANE_FUNCTION(IntNegate, std::int64_t, std::int64_t, detail::wrapped_subtract(0, a))
TESSERA_LANE_FUNCTION(IntAbsolute, std::int64_t, std::int64_t, a < 0 ? detail::wrapped_subtract(0, a) : a)
TESSERA_LANE_FUNCTION(IntInvert, std::int64_t, std::int64_t, ~a)
TESSERA_LANE_FUNCTION(IntAdd, std::int64_t, std::int64_t, detail::wrapped_add(a, b))
TESSERA_LANE_FUNCTION(IntSubtract, std::int64_t, std::int64_t, detail::wrapped_subtract(a, b))
TESSERA_LANE_FUNCTION(IntMultiply, std::int64_t, std::int64_t, detail::wrapped_multiply(a, b))
TESSERA_LANE_FUNCTION(IntDivide, std::int64_t, std::int64_t, detail::floor_divide(a, b))
TESSERA_LANE_FUNCTION(IntRemainder, std::int64_t, std::int64_t, detail::floor_remainder(a, b))
TESSERA_LANE_FUNCTION(IntMinimum, std::int64_t, std::int64_t, a < b ? a : b)
TESSERA_LANE_FUNCTION(IntMaximum, std::int64_t, std::int64_t, a > b ? a : b)
TESSERA_LANE_FUNCTION(IntAnd, std::int64_t, std::int64_t, a& b)
TESSERA_LANE_FUNCTION(IntOr, std::int64_t, std::int64_t, a | b)
TESSERA_LANE_FUNCTION(IntXor, std::int64_t, std::int64_t, a ^ b)
TESSERA_LANE_FUNCTION(IntShiftLeft, std::int64_t, std::int64_t, detail::wrapped_shift_left(a, b))
TESSERA_LANE_FUNCTION(IntShiftRight, std::int64_t, std::int64_t, a >> (b & 63))
TESSERA_LANE_FUNCTION(IntLess, std::int64_t, std::int32_t, a < b ? 1 : 0)
TESSERA_LANE_FUNCTION(IntLessEqual, std::int64_t, std::int32_t, a <= b ? 1 : 0)
TESSERA_LANE_FUNCTION(IntEqual, std::int64_t, std::int32_t, a == b ? 1 : 0)
TESSERA_LANE_FUNCTION(IntNotEqual, std::int64_t, std::int32_t, a != b ? 1 : 0)
TESSERA_LANE_FUNCTION(TruthInvert, std::int32_t, std::int32_t, 1 - a)
TESSERA_LANE_FUNCTION(TruthAnd, std::int32_t, std::int32_t, a& b)
TESSERA_LANE_FUNCTION(TruthOr, std::int32_t, std::int32_t, a | b)
TESSERA_LANE_FUNCTION(TruthXor, std::int32_t, std::int32_t, a ^ b)
TESSERA_LANE_FUNCTION(TruthToReal, std::int32_t, float, static_cast<float>(a))
TESSERA_LANE_FUNCTION(TruthToInteger, std::int32_t, std::int64_t, TESSERA_INT(a))
#undef TESSERA_INT
#undef TESSERA_LANE_FUNCTION

// The slot of the result must not be that of an operand.
template <class Function, class T, class R>
HWY_INLINE void for_lanes(const Lanes<T>& a, const Lanes<T>& b, R* HWY_RESTRICT out) {
  const T* HWY_RESTRICT x = a.at;
  const T* HWY_RESTRICT y = b.at;
  if (a.single) {
    const T one = *x;
#pragma omp simd
    for (int i = 0; i < kWide; ++i) out[i] = Function::of(one, y[i]);
  } else if (b.single) {
    const T one = *y;
#pragma omp simd
    for (int i = 0; i < kWide; ++i) out[i] = Function::of(x[i], one);
  } else {
#pragma omp simd
    for (int i = 0; i < kWide; ++i) out[i] = Function::of(x[i], y[i]);
  }
}

// Conversions between integers below 2^51 and doubles: adding 1.5·2^52 leaves the integer in the low bits. All of this
// has vector instructions, whereas the usual conversions have them only since AVX-512.
using LongTag = hn::ScalableTag<std::int64_t>;
constexpr double kIntegerDouble = 6755399441055744.0;
constexpr std::int64_t kIntegerBits = 0x4338000000000000;
HWY_INLINE double double_of(std::int64_t x) { return std::bit_cast<double>(x + kIntegerBits) - kIntegerDouble; }
HWY_INLINE std::int64_t integer_of(double x) { return std::bit_cast<std::int64_t>(x + kIntegerDouble) - kIntegerBits; }
HWY_INLINE bool fit_doubles(const std::int64_t* HWY_RESTRICT x) {
  const LongTag d;
  const hn::RebindToUnsigned<LongTag> bits;
  auto beyond = hn::Zero(bits);
  for (int i = 0; i < kWide; i += static_cast<int>(hn::Lanes(d))) {
    const auto above = hn::Add(hn::Load(d, x + i), hn::Set(d, std::int64_t{1} << 51));
    beyond = hn::Or(beyond, hn::ShiftRight<52>(hn::BitCast(bits, above)));
  }
  return hn::AllTrue(bits, hn::Eq(beyond, hn::Zero(bits)));
}

// Divides doubles, which represent these integers and products exactly. The nearest quotient is the floor or one more.
template <bool quotient>
HWY_INLINE void divide_doubles(const std::int64_t* HWY_RESTRICT x, double by, std::int64_t* HWY_RESTRICT out) {
  const double inverse = 1.0 / by;
#pragma omp simd
  for (int i = 0; i < kWide; ++i) {
    const double a = double_of(x[i]);
    const double nearest = (a * inverse + kIntegerDouble) - kIntegerDouble;
    const double rest = a - nearest * by;
    out[i] = integer_of(quotient ? nearest - (rest < 0.0 ? 1.0 : 0.0) : rest + (rest < 0.0 ? by : 0.0));
  }
}

// Divides by shifting or masking if `b` is a power of two, and by multiplying if doubles can represent all numbers.
template <class Function>
HWY_INLINE void divide_lanes(ExprOp op, const Lanes<std::int64_t>& a, const Lanes<std::int64_t>& b, std::int64_t* out) {
  const std::int64_t by = b.single ? *b.at : 0;
  const bool is_quotient = op == ExprOp::divide;
  if (by > 0 && (by & (by - 1)) == 0) {
    const std::int64_t amount = is_quotient ? __builtin_ctzll(static_cast<std::uint64_t>(by)) : by - 1;
    const Lanes<std::int64_t> second{&amount, true};
    if (is_quotient) return for_lanes<IntShiftRight>(a, second, out);
    return for_lanes<IntAnd>(a, second, out);
  }
  if (by > 0 && by < std::int64_t{1} << 51 && !a.single && fit_doubles(a.at)) {
    if (is_quotient) return divide_doubles<true>(a.at, static_cast<double>(by), out);
    return divide_doubles<false>(a.at, static_cast<double>(by), out);
  }
  for_lanes<Function>(a, b, out);
}

HWY_INLINE Vector real_vector(ExprOp op, Vector x) {
  const FloatTag d;
  switch (op) {
    case ExprOp::floor:
      return hn::Floor(x);
    case ExprOp::ceil:
      return hn::Ceil(x);
    case ExprOp::trunc:
      return hn::Trunc(x);
    case ExprOp::exp:
      return exp(x);
    case ExprOp::sqrt:
      return hn::Sqrt(x);
    case ExprOp::tanh:
      return tanh(x);
    default: {
      const Vector infinity = hn::Set(d, std::numeric_limits<float>::infinity());
      Vector found = hn::Log(d, x);
      found = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Neg(infinity), found);
      found = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Set(d, std::numeric_limits<float>::quiet_NaN()), found);
      found = hn::IfThenElse(hn::Eq(x, infinity), infinity, found);
      return hn::IfThenElse(hn::Eq(x, x), found, x);
    }
  }
}

inline void vector_lanes(ExprOp op, const float* x, float* out) {
  const FloatTag d;
  for (int i = 0; i < kWide; i += static_cast<int>(kLanes)) hn::Store(real_vector(op, hn::Load(d, x + i)), d, out + i);
}

// Converts directly with AVX-512, or if doubles cannot represent the integers; otherwise through doubles.
HWY_INLINE void real_of_integers(const std::int64_t* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  const bool direct = HWY_TARGET <= HWY_AVX3 || !fit_doubles(x);
  if (direct) {
    for (int i = 0; i < kWide; ++i) out[i] = static_cast<float>(x[i]);
    return;
  }
#pragma omp simd
  for (int i = 0; i < kWide; ++i) out[i] = static_cast<float>(double_of(x[i]));
}

inline void of_reals(ExprOp op, const Lanes<float>& a, const Lanes<float>& b, LaneSlot& out) {
  switch (op) {
    case ExprOp::negate:
      return for_lanes<RealNegate>(a, a, out.real);
    case ExprOp::absolute:
      return for_lanes<RealAbsolute>(a, a, out.real);
    case ExprOp::add:
      return for_lanes<RealAdd>(a, b, out.real);
    case ExprOp::subtract:
      return for_lanes<RealSubtract>(a, b, out.real);
    case ExprOp::multiply:
      return for_lanes<RealMultiply>(a, b, out.real);
    case ExprOp::divide:
      return for_lanes<RealDivide>(a, b, out.real);
    case ExprOp::minimum:
      return for_lanes<RealMinimum>(a, b, out.real);
    case ExprOp::maximum:
      return for_lanes<RealMaximum>(a, b, out.real);
    case ExprOp::power:
      return for_lanes<RealPower>(a, b, out.real);
    case ExprOp::sin:
      return for_lanes<RealSin>(a, a, out.real);
    case ExprOp::cos:
      return for_lanes<RealCos>(a, a, out.real);
    case ExprOp::less:
      return for_lanes<RealLess>(a, b, out.truth);
    case ExprOp::less_equal:
      return for_lanes<RealLessEqual>(a, b, out.truth);
    case ExprOp::equal:
      return for_lanes<RealEqual>(a, b, out.truth);
    case ExprOp::not_equal:
      return for_lanes<RealNotEqual>(a, b, out.truth);
    case ExprOp::to_integer:
      return for_lanes<RealToInteger>(a, a, out.integer);
    case ExprOp::remainder:
      for (int i = 0; i < kWide; ++i) {
        const float by = b.at[b.single ? 0 : i];
        const float rest = std::fmod(a.at[a.single ? 0 : i], by);
        out.real[i] = rest != 0.0F && (rest < 0.0F) != (by < 0.0F) ? rest + by : rest;
      }
      return;
    default:
      return vector_lanes(op, a.at, out.real);
  }
}

inline void of_integers(ExprOp op, const Lanes<std::int64_t>& a, const Lanes<std::int64_t>& b, LaneSlot& out) {
  switch (op) {
    case ExprOp::to_real:
      return real_of_integers(a.at, out.real);
    case ExprOp::negate:
      return for_lanes<IntNegate>(a, a, out.integer);
    case ExprOp::absolute:
      return for_lanes<IntAbsolute>(a, a, out.integer);
    case ExprOp::invert:
      return for_lanes<IntInvert>(a, a, out.integer);
    case ExprOp::add:
      return for_lanes<IntAdd>(a, b, out.integer);
    case ExprOp::subtract:
      return for_lanes<IntSubtract>(a, b, out.integer);
    case ExprOp::multiply:
      return for_lanes<IntMultiply>(a, b, out.integer);
    case ExprOp::divide:
      return divide_lanes<IntDivide>(op, a, b, out.integer);
    case ExprOp::remainder:
      return divide_lanes<IntRemainder>(op, a, b, out.integer);
    case ExprOp::minimum:
      return for_lanes<IntMinimum>(a, b, out.integer);
    case ExprOp::maximum:
      return for_lanes<IntMaximum>(a, b, out.integer);
    case ExprOp::bit_and:
      return for_lanes<IntAnd>(a, b, out.integer);
    case ExprOp::bit_or:
      return for_lanes<IntOr>(a, b, out.integer);
    case ExprOp::bit_xor:
      return for_lanes<IntXor>(a, b, out.integer);
    case ExprOp::shift_left:
      return for_lanes<IntShiftLeft>(a, b, out.integer);
    case ExprOp::shift_right:
      return for_lanes<IntShiftRight>(a, b, out.integer);
    case ExprOp::less:
      return for_lanes<IntLess>(a, b, out.truth);
    case ExprOp::less_equal:
      return for_lanes<IntLessEqual>(a, b, out.truth);
    case ExprOp::equal:
      return for_lanes<IntEqual>(a, b, out.truth);
    default:
      return for_lanes<IntNotEqual>(a, b, out.truth);
  }
}

inline void of_truths(ExprOp op, const Lanes<std::int32_t>& a, const Lanes<std::int32_t>& b, LaneSlot& out) {
  switch (op) {
    case ExprOp::to_real:
      return for_lanes<TruthToReal>(a, a, out.real);
    case ExprOp::to_integer:
      return for_lanes<TruthToInteger>(a, a, out.integer);
    case ExprOp::invert:
      return for_lanes<TruthInvert>(a, a, out.truth);
    case ExprOp::bit_and:
      return for_lanes<TruthAnd>(a, b, out.truth);
    case ExprOp::bit_or:
      return for_lanes<TruthOr>(a, b, out.truth);
    default:
      return for_lanes<TruthXor>(a, b, out.truth);
  }
}

template <class T>
inline void select_lanes(const Lanes<std::int32_t>& condition, const Lanes<T>& a, const Lanes<T>& b,
                         T* HWY_RESTRICT out) {
  alignas(64) T first[kWide];
  alignas(64) T second[kWide];
  const T* HWY_RESTRICT x = a.at;
  const T* HWY_RESTRICT y = b.at;
  if (a.single) x = std::fill_n(first, kWide, *a.at) - kWide;
  if (b.single) y = std::fill_n(second, kWide, *b.at) - kWide;
  if (condition.single) {
    std::copy_n(*condition.at != 0 ? x : y, kWide, out);
    return;
  }
  const std::int32_t* HWY_RESTRICT chosen = condition.at;
#pragma omp simd
  for (int i = 0; i < kWide; ++i) out[i] = chosen[i] != 0 ? x[i] : y[i];
}

// Whether each number is the previous one plus `step` (1 or -1).
HWY_INLINE bool are_steps(const std::int64_t* HWY_RESTRICT x, std::int64_t step) {
  const LongTag d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const auto steps = step > 0 ? hn::Iota(d, 0) : hn::Neg(hn::Iota(d, 0));
  auto expected = hn::Add(hn::Set(d, x[0]), steps);
  auto others = hn::Zero(d);
  for (int i = 0; i < kWide; i += lanes) {
    others = hn::Or(others, hn::Xor(hn::Load(d, x + i), expected));
    expected = hn::Add(expected, hn::Set(d, step * lanes));
  }
  return hn::AllTrue(d, hn::Eq(others, hn::Zero(d)));
}

// Positions often lead to neighbouring elements, which vectors can load.
template <class From, class To, class Convert>
inline void gather(const From* HWY_RESTRICT from, const std::int64_t* HWY_RESTRICT offset, To* HWY_RESTRICT out,
                   Convert convert) {
  const From* HWY_RESTRICT first = from + offset[0];
  if (offset[1] == offset[0] + 1 && are_steps(offset, 1)) {
    for (int i = 0; i < kWide; ++i) out[i] = convert(first[i]);
  } else if (offset[1] == offset[0] - 1 && are_steps(offset, -1)) {
    for (int i = 0; i < kWide; ++i) out[i] = convert(first[-i]);
  } else {
    for (int i = 0; i < kWide; ++i) out[i] = convert(from[offset[i]]);
  }
}

inline void load_lanes(const Tensor& tensor, int rank, const Lanes<std::int64_t>* index, LaneSlot& out) {
  alignas(64) std::int64_t offset[kWide] = {};
  for (int k = 0; k < rank; ++k) {
    const auto dim = static_cast<std::size_t>(k);
    const std::int64_t last = tensor.shape[dim] - 1;
    const std::int64_t stride = tensor.strides[dim];
    const std::int64_t* HWY_RESTRICT at = index[k].at;
    if (index[k].single) {
      const std::int64_t add = std::clamp<std::int64_t>(*at, 0, last) * stride;
      for (std::int64_t& each : offset) each += add;
      continue;
    }
#pragma omp simd
    for (int i = 0; i < kWide; ++i) {
      const std::int64_t low = at[i] < 0 ? 0 : at[i];
      offset[i] += (low > last ? last : low) * stride;
    }
  }
  switch (tensor.dtype) {
    case DType::fp32:
      return gather(tensor.as<float>(), offset, out.real, [](float x) { return x; });
    case DType::fp16:
      return gather(tensor.as<std::uint16_t>(), offset, out.real, detail::from_fp16);
    case DType::bf16:
      return gather(tensor.as<std::uint16_t>(), offset, out.real, detail::from_bf16);
    case DType::int32:
      return gather(tensor.as<std::int32_t>(), offset, out.integer, [](std::int32_t x) { return std::int64_t{x}; });
    case DType::int64:
      return gather(tensor.as<std::int64_t>(), offset, out.integer, [](std::int64_t x) { return x; });
    default:
      return gather(tensor.as<std::uint8_t>(), offset, out.integer, [](std::uint8_t x) { return std::int64_t{x}; });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
