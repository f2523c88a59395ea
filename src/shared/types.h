// SPDX-License-Identifier: Apache-2.0
// Types that host and device code share. g++ and NVRTC compile src/shared, so no file there includes std headers.
#pragma once

namespace tessera::cuda {

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

/// How an enumerator is spelled: type::word in a kernel's source, word in its name.
struct Spelling {
  const char* type;
  const char* word;
};

enum class Element : unsigned char { bf16, fp16, fp32, e4m3, e5m2, int8 };

constexpr Spelling spelling(Element element) {
  switch (element) {
    case Element::bf16:
      return {"Element", "bf16"};
    case Element::fp16:
      return {"Element", "fp16"};
    case Element::fp32:
      return {"Element", "fp32"};
    case Element::e4m3:
      return {"Element", "e4m3"};
    case Element::e5m2:
      return {"Element", "e5m2"};
    case Element::int8:
      return {"Element", "int8"};
  }
  return {};
}

constexpr bool has_eight_bits(Element element) { return element > Element::fp32; }
constexpr int bytes_of(Element element) { return element == Element::fp32 ? 4 : has_eight_bits(element) ? 1 : 2; }

/// The bytes that a thread copies at once, and the unit that the swizzle permutes.
inline constexpr int kChunkBytes = 16;
constexpr int elements_of_chunk(Element element) { return kChunkBytes / bytes_of(element); }

/// The bytes of a row of A, and of a column of B, that one mma or wgmma takes, whatever their type.
inline constexpr int kProductBytes = 32;
constexpr int depth_of_product(Element element) { return kProductBytes / bytes_of(element); }

template <class Int>
constexpr Int divide_up(Int a, Int b) {
  return (a + b - 1) / b;
}

template <class Int>
constexpr Int round_up(Int a, Int b) {
  return divide_up(a, b) * b;
}

/// Clamps a count to the largest int: 32-bit counts and indices in memory cannot exceed it.
constexpr int reachable(i64 count) {
  constexpr int most = 0x7fffffff;
  return count < most ? static_cast<int>(count) : most;
}

/// The columns of a panel. SharedTile cuts rows of `columns` columns into panels of 128 or 64 bytes.
constexpr int columns_of_panel(Element element, int columns) {
  return (columns * bytes_of(element) % 128 == 0 ? 128 : 64) / bytes_of(element);
}

/// The description of a tensor for the TMA (the driver's CUtensorMap). It is opaque; kernels get it by value as a
/// __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 words[16];
};

/// Division of numbers below 2^31 by a divisor that the host knows: a multiplication and a shift (Granlund and
/// Montgomery 1994, round up).
struct Divisor {
  u32 value = 1;
  u32 multiplier = 0;
  u32 shift = 0;

  Divisor() = default;
  constexpr explicit Divisor(int divisor) : value(static_cast<u32>(divisor)) {
    if (value == 1) return;
    u32 bits = 1;
    while ((u64{1} << bits) < value) ++bits;
    multiplier = static_cast<u32>(divide_up(u64{1} << (31 + bits), u64{value}));
    shift = bits - 1;
  }
};

/// The divisor of ptx::remainder, for 64-bit numbers.
struct WideDivisor {
  u64 value = 1;
  u64 inverse = ~u64{0};

  WideDivisor() = default;
  constexpr explicit WideDivisor(u64 divisor) : value(divisor), inverse(~u64{0} / divisor) {}
};

}  // namespace tessera::cuda
