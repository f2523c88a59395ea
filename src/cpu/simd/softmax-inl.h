// SPDX-License-Identifier: Apache-2.0
// exp and tanh as polynomials, and the element-wise loops over score tiles that use them.
// Included once per instruction set, after matmul-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

// e^x = 2^n · 2^f with n the nearest integer to x·log2(e), |f| ≤ ½. n comes from adding 1.5·2^23 + 127, which leaves
// n + 127, the exponent field of 2^n, in the low bits of the sum. 2^f is 1 + f·P(f), P of degree 5 minimising the
// relative error (Lawson's iteration; 1.7e-8 after rounding the coefficients to fp32).
constexpr std::int32_t kRoundBits = 0x4B40007F;
constexpr float kRound = 12583039.0F;
struct Exponential {
  hn::Vec<hn::RebindToSigned<FloatTag>> biased;  // kRoundBits + n
  Vector fraction;
};
HWY_INLINE Exponential split_exponential(Vector x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const Vector log2e = hn::Set(d, 1.44269504F);
  const Vector round = hn::Set(d, kRound);
  const Vector shifted = hn::MulAdd(x, log2e, round);
  const Vector f = hn::MulSub(x, log2e, hn::Sub(shifted, round));
  Vector p = hn::Set(d, 0.000153532586F);
  p = hn::MulAdd(p, f, hn::Set(d, 0.00133990031F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.00961843878F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555033199F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240226477F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147182F));
  return {hn::BitCast(di, shifted), hn::MulAdd(p, f, hn::Set(d, 1.0F))};
}

// exp(x) for x ≤ 88, +inf above; 0 below −87, where results would be subnormal; NaN stays NaN. 2^n goes into the
// exponent in two halves so that the largest results do not overflow on the way.
HWY_INLINE Vector exp(Vector x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const Exponential e = split_exponential(hn::Min(hn::Max(x, hn::Set(d, -88.0F)), hn::Set(d, 89.0F)));
  const auto exponent = hn::Sub(e.biased, hn::Set(di, kRoundBits));
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  Vector p = hn::Mul(e.fraction, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias))));
  p = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias))));
  p = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0F)), p);
  return hn::IfThenElse(hn::Eq(x, x), p, x);
}

// The same for x ≤ 0, the only case of the softmax: one factor 2^n is enough, and what the polynomial gives below −87
// is discarded. For NaN of any payload the fraction is NaN, and so is the product, whereas adding n to the fraction's
// bits might give a number.
HWY_INLINE Vector exp_nonpositive(Vector x) {
  const FloatTag d;
  const Exponential e = split_exponential(x);
  const Vector p = hn::Mul(e.fraction, hn::BitCast(d, hn::ShiftLeft<23>(e.biased)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0F)), p);
}

// Replaces a maximum of −inf or NaN by 0. With −inf (nothing is visible yet) −inf − −inf would be NaN. With NaN, hidden
// keys would get a weight, and masses sum the weights of tiles that a row does not see.
HWY_INLINE Vector finite_shift(Vector maximum) {
  const FloatTag d;
  const Vector lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  return hn::IfThenElseZero(hn::Lt(lowest, maximum), maximum);
}

// Adds the sum of a tile's weights to the rescaled sum of earlier tiles.
template <int kVectors>
HWY_INLINE void add_to_sums(const Vector* total, const float* correction, float* sum) {
  const FloatTag d;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Vector rescale = hn::LoadU(d, correction + v * kLanes);
    hn::StoreU(hn::MulAdd(rescale, hn::LoadU(d, sum + v * kLanes), total[v]), d, sum + v * kLanes);
  }
}

// Weights are summed in groups of this size first. If all were added to a sum that one weight dominates, each addition
// would cost a rounding error of the whole sum.
constexpr std::int64_t kSummed = 16;

template <int kVectors>
HWY_INLINE void softmax_strip(std::int64_t first, std::int64_t rows, float* s, float* maximum, float* sum,
                              float* correction) {
  const FloatTag d;
  Vector old[kVectors], shift[kVectors], total[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) old[v] = shift[v] = hn::LoadU(d, maximum + v * kLanes);
  for (std::int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) shift[v] = hn::Max(shift[v], hn::LoadU(d, s + row * kPanel + v * kLanes));
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    hn::StoreU(shift[v], d, maximum + v * kLanes);
    shift[v] = finite_shift(shift[v]);
    hn::StoreU(exp_nonpositive(hn::Sub(old[v], shift[v])), d, correction + v * kLanes);
    total[v] = hn::Zero(d);
  }
  for (std::int64_t row = 0; row < rows;) {
    Vector part[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) part[v] = hn::Zero(d);
    const std::int64_t end = std::min(rows, row + kSummed - (first + row) % kSummed);
    for (; row < end; ++row) {
      float* at = s + row * kPanel;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vector p = exp_nonpositive(hn::Sub(hn::LoadU(d, at + v * kLanes), shift[v]));
        part[v] = hn::Add(part[v], p);
        hn::StoreU(p, d, at + v * kLanes);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[v] = hn::Add(total[v], part[v]);
  }
  add_to_sums<kVectors>(total, correction, sum);
}

void softmax_step(std::int64_t first, std::int64_t rows, std::int64_t columns, float* s, float* maximum, float* sum,
                  float* correction) {
  std::int64_t column = 0;
  for (; column + kMaxVectors * kLanes <= columns; column += kMaxVectors * kLanes) {
    softmax_strip<kMaxVectors>(first, rows, s + column, maximum + column, sum + column, correction + column);
  }
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) {
    softmax_strip<2>(first, rows, s + column, maximum + column, sum + column, correction + column);
  }
  for (; column < columns; column += kLanes) {
    softmax_strip<1>(first, rows, s + column, maximum + column, sum + column, correction + column);
  }
}

void exp_rows(std::int64_t rows, std::int64_t columns, float* s, std::ptrdiff_t ld, const float* shift) {
  const FloatTag d;
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vector subtract = hn::Set(d, shift[row]);
    float* at = s + row * ld;
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      const Vector score = hn::LoadU(d, at + column);
      // A masked score has weight 0 even if the row's shift is NaN.
      const auto hidden = hn::Eq(score, hn::Set(d, -std::numeric_limits<float>::infinity()));
      hn::StoreU(hn::IfThenZeroElse(hidden, exp(hn::Sub(score, subtract))), d, at + column);
    }
  }
}

void score_gradient(std::int64_t rows, std::int64_t columns, const float* p, const float* dp, std::ptrdiff_t ld,
                    const float* delta, float factor, float* ds) {
  const FloatTag d;
  const Vector scale = hn::Set(d, factor);
  for (std::int64_t row = 0; row < rows; ++row) {
    const Vector subtract = hn::Set(d, delta[row]);
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      const std::ptrdiff_t at = row * ld + column;
      const Vector probability = hn::LoadU(d, p + at);
      const Vector gradient = hn::Mul(probability, hn::Mul(scale, hn::Sub(hn::LoadU(d, dp + at), subtract)));
      // A masked score has no gradient, even if its key is not finite.
      hn::StoreU(hn::IfThenZeroElse(hn::Eq(probability, hn::Zero(d)), gradient), d, ds + at);
    }
  }
}

void mask_window(std::int64_t rows, std::int64_t columns, float* s, const std::int32_t* low, const std::int32_t* high) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const Vector hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (std::int64_t column = 0; column < columns; column += kLanes) {
    const auto from = hn::LoadU(di, low + column);
    const auto to = hn::LoadU(di, high + column);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto key = hn::Set(di, static_cast<std::int32_t>(row));
      const auto outside = hn::Or(hn::Gt(from, key), hn::Gt(key, to));
      float* at = s + row * kPanel + column;
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, outside), hidden, hn::LoadU(d, at)), d, at);
    }
  }
}

// tanh(x) = (1 − e) / (1 + e) with e = exp(−2|x|). Below 0.625, where this would cancel, it is x + x³·P(x²) with P
// minimising the relative error (7e-9 after rounding its coefficients to fp32).
HWY_INLINE Vector tanh(Vector x) {
  const FloatTag d;
  const Vector magnitude = hn::Abs(x);
  const Vector one = hn::Set(d, 1.0F);
  const Vector e = exp_nonpositive(hn::Mul(magnitude, hn::Set(d, -2.0F)));
  const Vector large = hn::Div(hn::Sub(one, e), hn::Add(one, e));
  const Vector x2 = hn::Mul(x, x);
  Vector p = hn::Set(d, -0.00569738355F);
  p = hn::MulAdd(p, x2, hn::Set(d, 0.0206325464F));
  p = hn::MulAdd(p, x2, hn::Set(d, -0.0537377968F));
  p = hn::MulAdd(p, x2, hn::Set(d, 0.133314207F));
  p = hn::MulAdd(p, x2, hn::Set(d, -0.333332807F));
  p = hn::MulAdd(hn::Mul(p, x2), magnitude, magnitude);
  return hn::CopySign(hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625F)), p, large), x);
}

// 1 − tanh(x)² = 4e / (1 + e)² with e = exp(−2|x|). The difference would lose all digits if |x| is large.
HWY_INLINE Vector tanh_derivative(Vector x) {
  const FloatTag d;
  const Vector e = exp_nonpositive(hn::Mul(hn::Abs(x), hn::Set(d, -2.0F)));
  const Vector sum = hn::Add(hn::Set(d, 1.0F), e);
  return hn::Div(hn::Mul(hn::Set(d, 4.0F), e), hn::Mul(sum, sum));
}

void softcap(std::int64_t n, float cap, float* s, float* derivative) {
  const FloatTag d;
  const Vector scale = hn::Set(d, cap);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Vector x = hn::Div(hn::LoadU(d, s + i), scale);
    hn::StoreU(hn::Mul(scale, tanh(x)), d, s + i);
    if (derivative) hn::StoreU(tanh_derivative(x), d, derivative + i);
  }
}

// Computes the dot products of kRows pairs of rows. Every sum is the same chain of fused multiply-adds as in matmul, so
// that the gradient of a row with a single visible key is exactly 0, not the difference of two roundings.
template <int kRows>
HWY_INLINE void dot_block(std::int64_t n, const float* a, const float* b, std::ptrdiff_t ld, float* out) {
  const hn::CappedTag<float, 1> d;
  hn::Vec<decltype(d)> sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i] = hn::Zero(d);
  for (std::int64_t k = 0; k < n; ++k) {
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      sum[i] = hn::MulAdd(hn::Set(d, a[i * ld + k]), hn::Set(d, b[i * ld + k]), sum[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) out[i] = hn::GetLane(sum[i]);
}

void dot_rows(std::int64_t rows, std::int64_t n, const float* a, const float* b, std::ptrdiff_t ld, float* out) {
  std::int64_t row = 0;
  for (; row + 8 <= rows; row += 8) dot_block<8>(n, a + row * ld, b + row * ld, ld, out + row);
  for (; row < rows; ++row) dot_block<1>(n, a + row * ld, b + row * ld, ld, out + row);
}

bool all_finite(std::int64_t n, const float* a) {
  const FloatTag d;
  Vector sum = hn::Zero(d);  // 0·x is 0 exactly when x is finite
  for (std::int64_t i = 0; i < n; i += kLanes) sum = hn::MulAdd(hn::Zero(d), hn::LoadU(d, a + i), sum);
  return hn::AllTrue(d, hn::Eq(sum, hn::Zero(d)));
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
