// SPDX-License-Identifier: Apache-2.0
// The loops of the dot-product kernels on any machine: each instruction is emulated by a loop. An element of a tile is
// summed in the order of AMX, but subnormals are kept.
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "cpu/simd/dot_kernels.h"

#include "cpu/simd/dot_decode-inl.h"
#include "cpu/simd/dot_decode_tiles-inl.h"
#include "cpu/simd/dot_tiles-inl.h"
#include "cpu/simd/dot_vectors-inl.h"

namespace tessera::cpu {
namespace {

float low_half(std::uint32_t pair) { return std::bit_cast<float>(pair << 16U); }
float high_half(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xFFFF0000U); }

void add_pair(float& sum, std::uint32_t a, std::uint32_t b) {
  sum += low_half(a) * low_half(b);
  sum += high_half(a) * high_half(b);
}

struct EmulatedVectors {
  using Vector = std::array<float, kDotTile>;
  using Bits = std::array<std::uint32_t, kDotTile>;
  static Vector zero() { return {}; }
  static Vector load(const float* p) {
    Vector v;
    std::memcpy(v.data(), p, sizeof v);
    return v;
  }
  static Bits load(const std::uint32_t* p) {
    Bits v;
    std::memcpy(v.data(), p, sizeof v);
    return v;
  }
  static void store(const Vector& v, float* p) { std::memcpy(p, v.data(), sizeof v); }
  static void store(const Bits& v, std::uint32_t* p) { std::memcpy(p, v.data(), sizeof v); }
  static Vector multiply(Vector a, const Vector& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] *= b[i];
    return a;
  }
  static Bits broadcast(const std::uint16_t* pair) {
    std::uint32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    Bits v;
    v.fill(bits);
    return v;
  }
  static void transpose(Bits (&rows)[kDotTile]) {
    for (std::size_t i = 0; i < kDotTile; ++i) {
      for (std::size_t j = 0; j < i; ++j) std::swap(rows[i][j], rows[j][i]);
    }
  }
  static Bits interleave(const std::byte* low, const std::byte* high) {
    std::array<std::uint16_t, kDotTile> lower, upper;
    std::memcpy(lower.data(), low, sizeof lower);
    std::memcpy(upper.data(), high, sizeof upper);
    Bits v;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = lower[i] | std::uint32_t{upper[i]} << 16U;
    return v;
  }
  static Vector dot(Vector sum, const Bits& a, const Bits& b) {
    for (std::size_t i = 0; i < sum.size(); ++i) add_pair(sum[i], a[i], b[i]);
    return sum;
  }

  // The operations of TDPBF16PS in a decode of few queries. Flush does nothing: subnormals are kept.
  struct Flush {};
  static Vector low(const Bits& pairs) {
    Vector v;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = low_half(pairs[i]);
    return v;
  }
  static Vector high(const Bits& pairs) {
    Vector v;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = high_half(pairs[i]);
    return v;
  }
  static Vector widen(const std::byte* p) {
    std::array<std::uint16_t, kDotTile> numbers;
    std::memcpy(numbers.data(), p, sizeof numbers);
    Vector v;
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = low_half(numbers[i]);
    return v;
  }
  static Vector broadcast(const float* p) {
    Vector v;
    v.fill(*p);
    return v;
  }
  static Vector multiply_add(const Vector& a, const Vector& b, Vector c) {
    for (std::size_t i = 0; i < c.size(); ++i) c[i] += a[i] * b[i];
    return c;
  }
  static Vector add(Vector a, const Vector& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
};

struct EmulatedTiles {
  using Tile = std::array<std::array<std::uint32_t, kDotTile>, kDotTile>;
  static std::array<Tile, 8>& tiles() {
    thread_local std::array<Tile, 8> registers;
    return registers;
  }
  template <int kTile>
  static void zero() {
    tiles()[kTile] = {};
  }
  template <int kTile>
  static void load(const void* from, std::ptrdiff_t stride) {
    for (std::ptrdiff_t row = 0; row < kDotTile; ++row) {
      std::memcpy(tiles()[kTile][static_cast<std::size_t>(row)].data(),
                  static_cast<const std::byte*>(from) + row * stride, 64);
    }
  }
  template <int kTile>
  static void store(float* to, std::ptrdiff_t stride) {
    for (std::ptrdiff_t row = 0; row < kDotTile; ++row) {
      std::memcpy(reinterpret_cast<std::byte*>(to) + row * stride, tiles()[kTile][static_cast<std::size_t>(row)].data(),
                  64);
    }
  }
  template <int kSum, int kA, int kB>
  static void dot() {
    for (std::size_t i = 0; i < kDotTile; ++i) {
      std::array<float, kDotTile> even{}, odd{};
      for (std::size_t k = 0; k < kDotTile; ++k) {
        const std::uint32_t a = tiles()[kA][i][k];
        for (std::size_t j = 0; j < kDotTile; ++j) {
          even[j] += low_half(a) * low_half(tiles()[kB][k][j]);
          odd[j] += high_half(a) * high_half(tiles()[kB][k][j]);
        }
      }
      for (std::size_t j = 0; j < kDotTile; ++j) {
        const float sum = std::bit_cast<float>(tiles()[kSum][i][j]) + (even[j] + odd[j]);
        tiles()[kSum][i][j] = std::bit_cast<std::uint32_t>(sum);
      }
    }
  }
  static bool all_ones(std::int64_t n, const float* factor) {
    bool ones = true;
    for (std::int64_t j = 0; j < n; ++j) ones = ones && factor[j] == 1.0F;
    return ones;
  }
  static void scale(std::int64_t m, std::int64_t n, float* c, std::ptrdiff_t ldc, const float* factor) {
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) c[i * ldc + j] *= factor[j];
    }
  }
};

void nothing() {}

constexpr DotKernels kVectors = {nothing,
                                 nothing,
                                 dot_vectors_matmul<EmulatedVectors>,
                                 kVectorTiles,
                                 2,
                                 dot_decode_scores<EmulatedVectors>,
                                 dot_decode_values<EmulatedVectors>,
                                 dot_vectors_peak<EmulatedVectors>};
constexpr DotKernels kTiles = {nothing,
                               nothing,
                               dot_tiles_matmul<EmulatedTiles>,
                               kAmxTiles,
                               kDotStep,
                               decode_tile_scores<EmulatedVectors>,
                               decode_tile_values<EmulatedVectors>,
                               dot_tiles_peak<EmulatedTiles>};
constexpr NamedDotKernels kAll[] = {{"emulated_avx512_bf16", &kVectors}, {"emulated_amx_bf16", &kTiles}};

}  // namespace

std::span<const NamedDotKernels> emulated_dot_kernels() { return kAll; }

}  // namespace tessera::cpu
