// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 as pairs, the second operand of a dot product: two rows, interleaved element by element.
// Included once per instruction set, after softmax-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

// 2^x for a result that is rounded to bf16. 2^f is 1 + f·P(f) with P of degree 2: the relative error is 1.0e-4, a
// twentieth of half a unit of bf16, and 2^0 is 1. If x is −127 or less, −inf included, the exponent field and f are 0,
// and so is the result. x must be below 129. NaN stays NaN if its low 9 bits are 0 (default_nan.h).
HWY_INLINE Vector exp2_short(Vector x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const Vector round = hn::Set(d, 12582912.0F);
  x = hn::Max(hn::Set(d, -127.0F), x);
  const Vector shifted = hn::Add(x, round);
  const Vector f = hn::Sub(x, hn::Sub(shifted, round));
  Vector p = hn::Set(d, 0.0550089330F);
  p = hn::MulAdd(p, f, hn::Set(d, 0.242210954F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693282902F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// Joins the upper halves of both: two bf16 in a lane.
HWY_INLINE Bits join_upper(Bits low, Bits high) {
  const BitsTag d;
#if HWY_TARGET == HWY_SCALAR
  return hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(d, 0xFFFF0000U)));
#else
  const hn::Repartition<std::uint16_t, BitsTag> d16;
  return hn::BitCast(d, hn::OddEven(hn::BitCast(d16, high), hn::BitCast(d16, hn::ShiftRight<16>(low))));
#endif
}

// Rounds both to bf16 and joins them in a lane. Ties are rounded away from 0, not to even. This is good enough for
// probabilities: they are not negative, and only one in 2^16 is a tie. A NaN whose low 16 bits are 0 stays NaN
// (default_nan.h).
HWY_INLINE Bits join_probabilities(Vector low, Vector high) {
  const BitsTag d;
  const Bits half = hn::Set(d, 0x8000);
  return join_upper(hn::Add(hn::BitCast(d, low), half), hn::Add(hn::BitCast(d, high), half));
}

// Scores beyond this are rounded by more than their distance from the maximum may be. Then exponents are computed from
// differences of scores; otherwise one multiply-subtract is enough.
constexpr float kLargeScore = 0x1p24F;
HWY_INLINE bool is_large(Vector shift) {
  const FloatTag d;
  return !hn::AllFalse(d, hn::Gt(hn::Abs(shift), hn::Set(d, kLargeScore)));
}
HWY_INLINE Vector exponent_of_large(Vector score, float scale, Vector shift) {
  const FloatTag d;
  const Vector scaled = hn::Mul(score, hn::Set(d, scale));
  // The comparison keeps compilers from fusing both into one multiply-subtract, which would not give 0 at the maximum.
  const Vector apart = hn::IfThenElse(hn::Eq(scaled, shift), hn::Sub(shift, shift), hn::Sub(scaled, shift));
  return hn::Mul(apart, hn::Set(d, 1.44269504F));
}

template <int kVectors>
HWY_INLINE void softmax_pairs_strip(std::int64_t rows, float* s, float scale, float* maximum, float* sum,
                                    float* correction, std::uint32_t* pairs) {
  const FloatTag d;
  const BitsTag di;
  constexpr float kLog2E = 1.44269504F;
  Vector old[kVectors], shift[kVectors], total[kVectors];
  bool large = false;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) shift[v] = hn::LoadU(d, s + v * kLanes);
  for (std::int64_t row = 1; row < rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) shift[v] = hn::Max(shift[v], hn::LoadU(d, s + row * kPanel + v * kLanes));
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    old[v] = hn::LoadU(d, maximum + v * kLanes);
    shift[v] = hn::Max(old[v], hn::Mul(shift[v], hn::Set(d, scale)));
    hn::StoreU(shift[v], d, maximum + v * kLanes);
    shift[v] = finite_shift(shift[v]);
    hn::StoreU(exp_nonpositive(hn::Sub(old[v], shift[v])), d, correction + v * kLanes);
    total[v] = hn::Zero(d);
    large = large || is_large(shift[v]);
    shift[v] = hn::Mul(shift[v], hn::Set(d, kLog2E));
  }
  const Vector factor = hn::Set(d, scale * kLog2E);
  for (std::int64_t row = 0; large && row < rows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* at = s + row * kPanel + v * kLanes;
      const Vector base = finite_shift(hn::LoadU(d, maximum + v * kLanes));
      hn::StoreU(exponent_of_large(hn::LoadU(d, at), scale, base), d, at);
    }
  }
  const auto exponent = [&](const float* at, int v) HWY_ATTR {
    return large ? hn::LoadU(d, at) : hn::MulSub(hn::LoadU(d, at), factor, shift[v]);
  };
  for (std::int64_t row = 0; row < rows; row += 2) {
    const float* at = s + row * kPanel;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vector first = exp2_short(exponent(at + v * kLanes, v));
      const Vector second = exp2_short(exponent(at + kPanel + v * kLanes, v));
      total[v] = hn::Add(total[v], hn::Add(first, second));
      hn::StoreU(join_probabilities(first, second), di, pairs + row / 2 * kPanel + v * kLanes);
    }
  }
  add_to_sums<kVectors>(total, correction, sum);
}

void softmax_pairs(std::int64_t rows, std::int64_t columns, float* s, float scale, float* maximum, float* sum,
                   float* correction, std::uint32_t* pairs) {
  std::int64_t column = 0;
  const auto at = [&](auto* pointer) { return pointer + column; };
  for (; column + kMaxVectors * kLanes <= columns; column += kMaxVectors * kLanes) {
    softmax_pairs_strip<kMaxVectors>(rows, at(s), scale, at(maximum), at(sum), at(correction), at(pairs));
  }
  for (; column < columns; column += kLanes) {
    softmax_pairs_strip<1>(rows, at(s), scale, at(maximum), at(sum), at(correction), at(pairs));
  }
}

void round_pairs(std::int64_t rows, std::int64_t columns, const float* s, std::ptrdiff_t ld, std::uint32_t* pairs) {
  const FloatTag d;
  const BitsTag di;
  for (std::int64_t row = 0; row < rows; row += 2) {
    const float* at = s + row * ld;
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      const Bits low = to_bfloat_bits(hn::BitCast(di, hn::LoadU(d, at + column)));
      const Bits high = to_bfloat_bits(hn::BitCast(di, hn::LoadU(d, at + ld + column)));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), di, pairs + row / 2 * ld + column);
    }
  }
}

// Stores the upper halves of the lanes contiguously.
HWY_INLINE void store_upper(Bits x, std::uint16_t* to) {
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<std::int16_t, FloatTag> d16;
  const auto extended = hn::ShiftRight<16>(hn::BitCast(di, x));  // signed, so that a saturating narrowing keeps it
  hn::StoreU(hn::DemoteTo(d16, extended), d16, reinterpret_cast<std::int16_t*>(to));
}

void gradient_pairs(std::int64_t rows, std::int64_t columns, const float* s, const float* dp, std::ptrdiff_t ld,
                    float scale, const float* shift, const float* delta, std::uint32_t* p, std::uint32_t* ds,
                    std::uint16_t* ds_rows) {
  const FloatTag d;
  const BitsTag di;
  constexpr float kLog2E = 1.44269504F;
  const Vector factor = hn::Set(d, scale * kLog2E);
  const Bits half = hn::Set(di, 0x8000);
  for (std::int64_t row = 0; row < rows; row += 2) {
    Vector subtract[2], mean[2];
    bool large[2];
    for (int i = 0; i < 2; ++i) {
      large[i] = is_large(hn::Set(d, shift[row + i]));
      subtract[i] = hn::Set(d, shift[row + i] * kLog2E);
      mean[i] = hn::Set(d, delta[row + i]);
    }
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      Bits weight[2], gradient[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const std::ptrdiff_t at = (row + i) * ld + column;
        const Vector score = hn::LoadU(d, s + at);
        const Vector exponent = large[i] ? exponent_of_large(score, scale, hn::Set(d, shift[row + i]))
                                         : hn::MulSub(score, factor, subtract[i]);
        // The exponent exceeds 127 only if the LSE is not that of these scores: the result is infinity, while NaN stays
        // NaN. A masked score has weight 0 even if the LSE is NaN.
        const auto hidden = hn::Eq(score, hn::Set(d, -std::numeric_limits<float>::infinity()));
        const Vector probability = hn::IfThenZeroElse(hidden, exp2_short(hn::Min(hn::Set(d, 128.0F), exponent)));
        const Vector product = hn::Mul(probability, hn::Sub(hn::LoadU(d, dp + at), mean[i]));
        weight[i] = hn::Add(hn::BitCast(di, probability), half);
        // A masked score has no gradient, even if its key is not finite.
        const Vector kept = hn::IfThenZeroElse(hn::Eq(probability, hn::Zero(d)), product);
        gradient[i] = hn::Add(hn::BitCast(di, kept), half);
        store_upper(gradient[i], ds_rows + at);
      }
      const std::ptrdiff_t pair = row / 2 * ld + column;
      hn::StoreU(join_upper(weight[0], weight[1]), di, p + pair);
      hn::StoreU(join_upper(gradient[0], gradient[1]), di, ds + pair);
    }
  }
}

void scale_rows(std::int64_t rows, std::int64_t columns, float* s, std::ptrdiff_t ld, float factor) {
  const FloatTag d;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      float* at = s + row * ld + column;
      hn::StoreU(hn::Mul(hn::LoadU(d, at), hn::Set(d, factor)), d, at);
    }
  }
}

void add_row(std::int64_t n, float factor, const float* x, float* s) {
  const FloatTag d;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, s + i), hn::LoadU(d, x + i)), d, s + i);
  }
}

bool bf16_finite(std::int64_t n, const std::uint16_t* values) {
  const hn::CappedTag<std::int16_t, kPad> d;
  const auto magnitude = hn::Set(d, 0x7FFF);
  auto largest = hn::Zero(d);
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    largest = hn::Max(largest, hn::And(magnitude, hn::LoadU(d, reinterpret_cast<const std::int16_t*>(values + i))));
  }
  return hn::AllTrue(d, hn::Lt(largest, hn::Set(d, 0x7F80)));
}

void interleave(std::int64_t rows, std::int64_t columns, const std::uint16_t* source, std::ptrdiff_t source_ld,
                std::uint32_t* pairs, std::ptrdiff_t ld) {
  const BitsTag di;
  const hn::Rebind<std::uint16_t, BitsTag> d16;
  for (std::int64_t row = 0; row < rows; row += 2) {
    const std::uint16_t* at = source + row * source_ld;
    for (std::int64_t column = 0; column < columns; column += kLanes) {
      const Bits low = hn::PromoteTo(di, hn::LoadU(d16, at + column));
      const Bits high = hn::PromoteTo(di, hn::LoadU(d16, at + source_ld + column));
      hn::StoreU(hn::Or(low, hn::ShiftLeft<16>(high)), di, pairs + row / 2 * ld + column);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
