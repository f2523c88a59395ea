// SPDX-License-Identifier: Apache-2.0
// Conversions of rows to and from fp32, and the transposition that packs rows into panels.
// Included once per instruction set, after matmul-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE void load_row_as(const std::byte* bytes, std::int64_t count, float scale, float* target,
                            std::int64_t width) {
  const FloatTag d;
  const T* source = reinterpret_cast<const T*>(bytes);
  const Vector factor = hn::Set(d, scale);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::Mul(load_as_float(source + i), factor), d, target + i);
  if (i < count) {
    alignas(64) T rest[kPad] = {};
    std::memcpy(rest, source + i, static_cast<std::size_t>(count - i) * sizeof(T));
    hn::StoreU(hn::Mul(load_as_float(rest), factor), d, target + i);
    i += kLanes;
  }
  for (; i < width; i += kLanes) hn::StoreU(hn::Zero(d), d, target + i);
}

template <class T>
void load_rows_as(const std::byte* source, std::ptrdiff_t stride, std::int64_t rows, std::int64_t count, float scale,
                  float* target, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row) {
    load_row_as<T>(source + row * stride, count, scale, target + row * width, width);
  }
}

void load_rows(DType dtype, const std::byte* source, std::ptrdiff_t stride, std::int64_t rows, std::int64_t count,
               float scale, float* target, std::int64_t width) {
  with_operand_of(
      dtype, [&](auto number) { load_rows_as<decltype(number)>(source, stride, rows, count, scale, target, width); });
}

template <class T>
void store_row_as(const float* source, std::int64_t count, std::byte* target) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(float));
  } else {
    const FloatTag d;
    const hn::Rebind<std::uint16_t, FloatTag> d16;
    const auto round = [&](const float* from) HWY_ATTR {
      const auto half = bits_of(T(), hn::BitCast(BitsTag(), hn::LoadU(d, from)));
      // 16 significant bits in each 32-bit lane; signed saturation must not touch them.
      return hn::BitCast(d16, hn::DemoteTo(hn::RebindToSigned<decltype(d16)>(), sign_extend_16(half)));
    };
    std::uint16_t* to = reinterpret_cast<std::uint16_t*>(target);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) hn::StoreU(round(source + i), d16, to + i);
    if (i < count) {
      alignas(64) float values[kPad] = {};
      alignas(64) std::uint16_t bits[kPad];
      const auto live = static_cast<std::size_t>(count - i);
      std::memcpy(values, source + i, live * sizeof(float));
      hn::StoreU(round(values), d16, bits);
      std::memcpy(to + i, bits, live * sizeof *bits);
    }
  }
}

void store_row(DType dtype, const float* source, std::int64_t count, std::byte* target) {
  with_number_of(dtype, [&](auto number) { store_row_as<decltype(number)>(source, count, target); });
}

#if HWY_TARGET != HWY_SCALAR
// Loads blocks of 4 numbers, one block from each fourth row.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const float* at, std::ptrdiff_t ld) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::LoadU(d, at);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, at + hn::MaxLanes(half) * ld, ld), load_blocks(half, at, ld));
  }
}

// Transposes as many rows as a vector has lanes, 4 columns at a time. Each 4 × 4 block is transposed within a block of
// 4 lanes.
template <class D>
HWY_INLINE void transpose_rows(D d, std::int64_t columns, const float* source, std::ptrdiff_t source_ld, float* target,
                               std::ptrdiff_t ld) {
  const hn::Repartition<double, D> dd;
  const auto upper = [&](auto a, auto b) {  // the upper pairs of both
    return hn::BitCast(d, hn::InterleaveUpper(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  };
  const auto lower = [&](auto a, auto b) {
    return hn::BitCast(d, hn::InterleaveLower(dd, hn::BitCast(dd, a), hn::BitCast(dd, b)));
  };
  for (std::int64_t c = 0; c < columns; c += 4) {
    const auto r0 = load_blocks(d, source + c, source_ld);
    const auto r1 = load_blocks(d, source + source_ld + c, source_ld);
    const auto r2 = load_blocks(d, source + 2 * source_ld + c, source_ld);
    const auto r3 = load_blocks(d, source + 3 * source_ld + c, source_ld);
    const auto low01 = hn::InterleaveLower(d, r0, r1);  // 00 10 01 11
    const auto low23 = hn::InterleaveLower(d, r2, r3);
    const auto high01 = hn::InterleaveUpper(d, r0, r1);
    const auto high23 = hn::InterleaveUpper(d, r2, r3);
    float* to = target + c * ld;
    hn::StoreU(lower(low01, low23), d, to);
    hn::StoreU(upper(low01, low23), d, to + ld);
    hn::StoreU(lower(high01, high23), d, to + 2 * ld);
    hn::StoreU(upper(high01, high23), d, to + 3 * ld);
  }
}
#endif

void transpose(std::int64_t rows, std::int64_t columns, const float* source, std::ptrdiff_t source_ld, float* target,
               std::ptrdiff_t ld) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) target[c * ld + r] = source[r * source_ld + c];
  }
#else
  std::int64_t r = 0;
#if HWY_ARCH_X86
  for (; r + kLanes <= rows; r += kLanes) {
    transpose_rows(FloatTag(), columns, source + r * source_ld, source_ld, target + r, ld);
  }
#endif
  for (; r < rows; r += 4) {
    transpose_rows(hn::CappedTag<float, 4>(), columns, source + r * source_ld, source_ld, target + r, ld);
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
