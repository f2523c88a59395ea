// SPDX-License-Identifier: Apache-2.0
// The residual of O: what rounding it to 16 bits loses, as signed bytes, in steps of 1/254 of the spacing of O's type
// at the rounded value (docs/semantics.md, 6). Included once per instruction set, after rows-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

using IntegerTag = hn::RebindToSigned<FloatTag>;
using Integers = hn::Vec<IntegerTag>;

constexpr float kResidualSteps = 254.0F;  // steps in a spacing; the largest residual is half a spacing

// digits: bits of the fraction of O's type; least: the biased exponent of fp32 below which the spacing is constant. The
// spacing of bf16 is at least 2^-126, so that it and its reciprocal are normal numbers.
struct ResidualFormat {
  std::int32_t digits;
  std::int32_t least;
};

HWY_INLINE ResidualFormat residual_format(DType dtype) {
  return dtype == DType::bf16 ? ResidualFormat{7, 8} : ResidualFormat{10, 113};
}

// Biased exponents of fp32; 255 for numbers that are not finite.
HWY_INLINE Integers exponents(Vector x) {
  const IntegerTag d;
  return hn::And(hn::ShiftRight<23>(hn::BitCast(d, x)), hn::Set(d, 0xFF));
}

HWY_INLINE Vector power_of_two(Integers biased) { return hn::BitCast(FloatTag(), hn::ShiftLeft<23>(biased)); }

HWY_INLINE Integers residual_bytes(Vector exact, Vector rounded, ResidualFormat format) {
  const FloatTag d;
  const IntegerTag di;
  const Integers exponent = hn::Max(exponents(rounded), hn::Set(di, format.least));
  const Vector reciprocal = power_of_two(hn::Sub(hn::Set(di, 254 + format.digits), exponent));
  const Vector steps = hn::Mul(hn::Mul(hn::Sub(exact, rounded), reciprocal), hn::Set(d, kResidualSteps));
  const auto finite = hn::RebindMask(d, hn::Lt(exponent, hn::Set(di, 255)));
  return hn::NearestInt(hn::IfThenElseZero(finite, steps));
}

HWY_INLINE Vector with_residual(Vector rounded, Integers bytes, ResidualFormat format) {
  const FloatTag d;
  const IntegerTag di;
  const Integers exponent = hn::Max(exponents(rounded), hn::Set(di, format.least));
  const Vector spacing = power_of_two(hn::Sub(exponent, hn::Set(di, format.digits)));
  return hn::MulAdd(hn::ConvertTo(d, bytes), hn::Mul(spacing, hn::Set(d, 1.0F / kResidualSteps)), rounded);
}

void store_residual(DType dtype, const float* exact, const std::byte* rounded, std::int64_t count,
                    std::int8_t* target) {
  const FloatTag d;
  const hn::Rebind<std::int8_t, FloatTag> d8;
  const ResidualFormat format = residual_format(dtype);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::int64_t live = std::min(count - i, kLanes);
    alignas(64) float of_rounded[kPad];
    alignas(64) float of_exact[kPad] = {};
    alignas(64) std::int8_t bytes[kPad];
    load_rows(dtype, rounded + 2 * i, 0, 1, live, 1.0F, of_rounded, kLanes);
    std::memcpy(of_exact, exact + i, static_cast<std::size_t>(live) * sizeof(float));
    hn::StoreU(hn::DemoteTo(d8, residual_bytes(hn::LoadU(d, of_exact), hn::LoadU(d, of_rounded), format)), d8, bytes);
    std::memcpy(target + i, bytes, static_cast<std::size_t>(live));
  }
}

void add_residual(DType dtype, const std::int8_t* residual, std::int64_t count, float* row) {
  const FloatTag d;
  const hn::Rebind<std::int8_t, FloatTag> d8;
  const IntegerTag di;
  const ResidualFormat format = residual_format(dtype);
  const auto add = [&](const std::int8_t* from, float* to) HWY_ATTR {
    hn::StoreU(with_residual(hn::LoadU(d, to), hn::PromoteTo(di, hn::LoadU(d8, from)), format), d, to);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add(residual + i, row + i);
  if (i < count) {
    alignas(64) std::int8_t bytes[kPad] = {};
    alignas(64) float values[kPad] = {};
    const auto live = static_cast<std::size_t>(count - i);
    std::memcpy(bytes, residual + i, live);
    std::memcpy(values, row + i, live * sizeof(float));
    add(bytes, values);
    std::memcpy(row + i, values, live * sizeof(float));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
