// SPDX-License-Identifier: Apache-2.0
// Conversions of every element type to fp32, and of fp32 to fp16 and bf16. fp16 and bf16 use integer arithmetic, so
// that every instruction set rounds alike (to nearest, ties to even; subnormals, infinities and NaN kept). Included
// once per instruction set, after matmul-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

using BitsTag = hn::RebindToUnsigned<FloatTag>;
using Bits = hn::Vec<BitsTag>;

// fp32 bits to bf16 bits in the low half of each lane.
HWY_INLINE Bits to_bfloat_bits(Bits x) {
  const BitsTag d;
  const FloatTag df;
  const Bits odd = hn::And(hn::ShiftRight<16>(x), hn::Set(d, 1));
  const Bits rounded = hn::ShiftRight<16>(hn::Add(hn::Add(x, hn::Set(d, 0x7FFF)), odd));
  const Bits quiet = hn::Or(hn::ShiftRight<16>(x), hn::Set(d, 0x40));  // a NaN must not round to infinity
  const auto number = hn::Eq(hn::BitCast(df, x), hn::BitCast(df, x));
  return hn::IfThenElse(hn::RebindMask(d, number), rounded, quiet);
}

// fp16 bits (low half of each lane) to fp32: the exponent is re-biased by a multiplication with 2^112, which is exact
// for subnormals too.
HWY_INLINE Vector from_half_bits(Bits x) {
  const BitsTag d;
  const FloatTag df;
  const Bits sign = hn::ShiftLeft<16>(hn::And(x, hn::Set(d, 0x8000)));
  const Bits magnitude = hn::ShiftLeft<13>(hn::And(x, hn::Set(d, 0x7FFF)));
  const Vector scaled = hn::Mul(hn::BitCast(df, magnitude), hn::BitCast(df, hn::Set(d, 0x77800000)));
  // Exponent 31 (infinity, NaN) has become at least 2^16.
  const auto special = hn::Ge(scaled, hn::Set(df, 65536.0F));
  const Bits infinite = hn::Or(hn::BitCast(d, scaled), hn::Set(d, 0x7F800000));
  const Bits result = hn::IfThenElse(hn::RebindMask(d, special), infinite, hn::BitCast(d, scaled));
  return hn::BitCast(df, hn::Or(result, sign));
}

// fp32 bits to fp16 bits in the low half of each lane.
HWY_INLINE Bits to_half_bits(Bits x) {
  const BitsTag d;
  const FloatTag df;
  const Bits sign = hn::And(hn::ShiftRight<16>(x), hn::Set(d, 0x8000));
  const Bits magnitude = hn::And(x, hn::Set(d, 0x7FFFFFFF));
  // Normal results: round away 13 bits, ties to even, and re-bias the exponent by −112.
  const Bits odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d, 1));
  const Bits normal =
      hn::ShiftRight<13>(hn::Sub(hn::Add(hn::Add(magnitude, hn::Set(d, 0xFFF)), odd), hn::Set(d, 112U << 23)));
  // Subnormal results: adding ½ puts units of 2^-24 into the last bit, rounded by the addition itself.
  const Vector half = hn::Set(df, 0.5F);
  const Bits tiny = hn::Sub(hn::BitCast(d, hn::Add(hn::BitCast(df, magnitude), half)), hn::BitCast(d, half));
  const Vector absolute = hn::BitCast(df, magnitude);
  Bits result = hn::IfThenElse(hn::RebindMask(d, hn::Lt(absolute, hn::Set(df, 6.103515625e-5F))), tiny, normal);
  result = hn::IfThenElse(hn::RebindMask(d, hn::Ge(absolute, hn::Set(df, 65520.0F))), hn::Set(d, 0x7C00), result);
  const auto number = hn::Eq(absolute, absolute);
  result = hn::IfThenElse(hn::RebindMask(d, number), result, hn::Set(d, 0x7E00));
  return hn::Or(result, sign);
}

// 16 bits in a 32-bit lane, sign-extended, so that a saturating narrowing keeps them.
HWY_INLINE hn::Vec<hn::RebindToSigned<FloatTag>> sign_extend_16(Bits x) {
  const hn::RebindToSigned<FloatTag> di;
  return hn::ShiftRight<16>(hn::BitCast(di, hn::ShiftLeft<16>(x)));
}

// Loads one element per lane, as fp32.
HWY_INLINE Vector load_as_float(const float* source) { return hn::LoadU(FloatTag(), source); }

HWY_INLINE Vector load_as_float(const hwy::bfloat16_t* source) {
  const FloatTag d;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(source)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

HWY_INLINE Vector load_as_float(const hwy::float16_t* source) {
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  return from_half_bits(hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(source))));
}

// Bytes of the 8-bit floating types, as distinct C++ types.
struct E4m3 {
  std::uint8_t bits;
};
struct E5m2 {
  std::uint8_t bits;
};

HWY_INLINE Bits load_bytes(const void* source) {
  const hn::Rebind<std::uint8_t, FloatTag> d8;
  return hn::PromoteTo(BitsTag(), hn::LoadU(d8, static_cast<const std::uint8_t*>(source)));
}

// Adds `bias` to the exponent of an 8-bit number's magnitude, which is shifted to fp32's bit positions. A subnormal
// number is computed as a normal one minus its leading 1. So no fp32 operand is subnormal: the caller's thread may have
// set the processor to read such operands as 0.
HWY_INLINE Bits rebias(Bits magnitude, std::uint32_t bias) {
  const BitsTag d;
  const FloatTag df;
  const Bits normal = hn::Add(magnitude, hn::Set(d, bias << 23));
  const Bits one = hn::Set(d, 1U << 23);
  const Vector least = hn::BitCast(df, hn::Set(d, (bias + 1) << 23));
  const Vector tiny = hn::Sub(hn::BitCast(df, hn::Add(normal, one)), least);
  return hn::IfThenElse(hn::Eq(hn::ShiftRight<23>(magnitude), hn::Zero(d)), hn::BitCast(d, tiny), normal);
}

// The largest magnitude is NaN.
HWY_INLINE Vector load_as_float(const E4m3* source) {
  const BitsTag d;
  const Bits x = load_bytes(source);
  const Bits magnitude = hn::And(x, hn::Set(d, 0x7F));
  const Bits number = rebias(hn::ShiftLeft<20>(magnitude), 120);
  const Bits result = hn::IfThenElse(hn::Eq(magnitude, hn::Set(d, 0x7F)), hn::Set(d, 0x7FC00000), number);
  return hn::BitCast(FloatTag(), hn::Or(result, hn::ShiftLeft<24>(hn::And(x, hn::Set(d, 0x80)))));
}

// Exponent 31 is that of infinity and NaN.
HWY_INLINE Vector load_as_float(const E5m2* source) {
  const BitsTag d;
  const Bits x = load_bytes(source);
  const Bits magnitude = hn::ShiftLeft<21>(hn::And(x, hn::Set(d, 0x7F)));
  const Bits number = rebias(magnitude, 112);
  const auto special = hn::Eq(hn::ShiftRight<23>(magnitude), hn::Set(d, 31));
  const Bits result = hn::IfThenElse(special, hn::Or(magnitude, hn::Set(d, 0x7F800000)), number);
  return hn::BitCast(FloatTag(), hn::Or(result, hn::ShiftLeft<24>(hn::And(x, hn::Set(d, 0x80)))));
}

HWY_INLINE Vector load_as_float(const std::int8_t* source) {
  const hn::Rebind<std::int8_t, FloatTag> d8;
  const hn::RebindToSigned<FloatTag> d32;
  return hn::ConvertTo(FloatTag(), hn::PromoteTo(d32, hn::LoadU(d8, source)));
}

// fp32 bits to those of a narrower type, in the low half of each lane.
HWY_INLINE Bits bits_of(hwy::bfloat16_t /*type*/, Bits x) { return to_bfloat_bits(x); }
HWY_INLINE Bits bits_of(hwy::float16_t /*type*/, Bits x) { return to_half_bits(x); }

// Calls the task with a number of this type, one that results may have, too.
template <class Task>
void with_number_of(DType dtype, const Task& task) {
  if (dtype == DType::fp32) {
    task(float());
  } else if (dtype == DType::bf16) {
    task(hwy::bfloat16_t());
  } else {
    task(hwy::float16_t());
  }
}

// The same for any type that operands may have.
template <class Task>
void with_operand_of(DType dtype, const Task& task) {
  if (dtype == DType::e4m3) {
    task(E4m3());
  } else if (dtype == DType::e5m2) {
    task(E5m2());
  } else if (dtype == DType::int8) {
    task(std::int8_t());
  } else {
    with_number_of(dtype, task);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
