// SPDX-License-Identifier: Apache-2.0
// What host and device code say alike. Compiled by g++ and NVRTC: no std headers anywhere in src/shared.
#pragma once

namespace tessera::cuda {

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

/// How an enumerator is written: in a kernel's source as type::word, in its name as word.
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

/// What a thread copies at once and a swizzle exchanges.
inline constexpr int kChunkBytes = 16;
constexpr int elements_of_chunk(Element element) { return kChunkBytes / bytes_of(element); }

/// What one product of tensor cores takes of a row of A and a column of B, whatever their type.
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

/// A count that numbers of 32 bits in memory reach at most: of more, as many as they can.
constexpr int reachable(i64 count) {
  constexpr int most = 0x7fffffff;
  return count < most ? static_cast<int>(count) : most;
}

/// Columns of a panel, 128 or 64 bytes, into which rows of so many columns are cut in shared memory: see SharedTile.
constexpr int columns_of_panel(Element element, int columns) {
  return (columns * bytes_of(element) % 128 == 0 ? 128 : 64) / bytes_of(element);
}

/// What TMA knows of a tensor (the driver's CUtensorMap): opaque, passed to kernels by value as a
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

/// Division of 64-bit numbers, by ptx::remainder.
struct WideDivisor {
  u64 value = 1;
  u64 inverse = ~u64{0};

  WideDivisor() = default;
  constexpr explicit WideDivisor(u64 divisor) : value(divisor), inverse(~u64{0} / divisor) {}
};

}  // namespace tessera::cuda
