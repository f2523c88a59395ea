// SPDX-License-Identifier: Apache-2.0
// Products of matrices. The last lane of a warp does the work of all, in fp32, one step of the depth after another.
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "driver/fibres.h"
#include "driver/tensor_map.h"

namespace emulator {
namespace {

constexpr int kDepth = 16;
constexpr int kByteDepth = 32;  // of e4m3 and int8

/// fp16 as fp32, from a table: a conversion by bits takes longer than the products.
const std::array<float, 65536>& halves() {
  static const auto table = [] {
    std::array<float, 65536> all{};
    for (u32 bits = 0; bits < all.size(); ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      _Float16 value;
      std::memcpy(&value, &half, 2);
      all[bits] = static_cast<float>(value);
    }
    return all;
  }();
  return table;
}

/// e4m3 or int8 as fp32.
float from_byte(u32 byte, bool int8) {
  if (int8) return static_cast<float>(static_cast<std::int8_t>(byte));
  const float sign = (byte & 0x80) != 0 ? -1.0F : 1.0F;
  const int exponent = static_cast<int>(byte >> 3 & 15);
  const auto digits = static_cast<float>(byte & 7);
  if ((byte & 0x7f) == 0x7f) return __builtin_nanf("");
  return sign * (exponent == 0 ? __builtin_ldexpf(digits, -9) : __builtin_ldexpf(8 + digits, exponent - 10));
}

float element(u32 both, int index, bool bf16) { return to_float(index == 0 ? both & 0xffff : both >> 16, bf16); }

/// The lanes' parts of A (16 x 16), see src/cuda/ptx/mma_sync.cuh.
void gather_a(float (&a)[16][kDepth], int lane, const u32 (&parts)[4], bool bf16) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + j] = element(parts[i], j, bf16);
  }
}

/// Likewise of 8 bits, A (16 x 32): see src/cuda/ptx/wgmma.cuh.
void gather_bytes(float (&a)[16][kByteDepth], int lane, const u32 (&parts)[4], bool int8) {
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      a[lane / 4 + i % 2 * 8][lane % 4 * 4 + i / 2 * 16 + j] = from_byte(parts[i] >> (8 * j) & 0xff, int8);
    }
  }
}

struct WarpProduct {
  float (*c)[4];
  const u32 (*a)[4];
  u32 b[2];
  bool bf16;
};

struct Groups {
  std::vector<GroupProduct> begun;                   // not committed
  std::vector<std::vector<GroupProduct>> committed;  // the oldest first
};
std::vector<Groups> groups;  // of each thread

/// A matrix in shared memory by its descriptor: see src/cuda/ptx/wgmma.cuh.
class SharedMatrix {
 public:
  SharedMatrix(u64 descriptor, const GroupProduct& product)
      : base_(static_cast<u32>(descriptor & 0x3fff) << 4),
        leading_(static_cast<u32>(descriptor >> 16 & 0x3fff) << 4),
        stride_(static_cast<u32>(descriptor >> 32 & 0x3fff) << 4),
        row_bytes_(descriptor >> 62 == 1 ? 128 : 64),
        bf16_(product.bf16),
        bytes_(product.e4m3 || product.int8),
        int8_(product.int8),
        at_(product.at) {
    if (descriptor >> 62 != 1 && descriptor >> 62 != 2) fail("a descriptor of another swizzle than 1 or 2", at_);
  }
  /// Rows along the depth.
  [[nodiscard]] float along(u32 row, u32 k) const {
    return at(base_ + row / 8 * stride_ + row % 8 * row_bytes_ + k * (bytes_ ? 1 : 2));
  }
  /// Rows across it.
  [[nodiscard]] float across(u32 k, u32 column) const {
    const u32 columns = row_bytes_ / 2;
    return at(base_ + column / columns * leading_ + k / 8 * stride_ + k % 8 * row_bytes_ + column % columns * 2);
  }

 private:
  [[nodiscard]] float at(u32 address) const {
    if (bytes_) return from_byte(static_cast<unsigned char>(*shared(swizzled(address, row_bytes_), 1, at_)), int8_);
    std::uint16_t bits;
    std::memcpy(&bits, shared(swizzled(address, row_bytes_), 2, at_), 2);
    return to_float(bits, bf16_);
  }

  u32 base_, leading_, stride_, row_bytes_;
  bool bf16_, bytes_, int8_;
  Place at_;
};

bool same(const GroupProduct& x, const GroupProduct& y) {
  return x.a == y.a && x.b == y.b && x.n == y.n && x.add == y.add && x.at.line == y.at.line && x.at.file == y.at.file;
}

/// Product `index` of each lane's oldest group.
void multiply(void* const (&lanes)[32], std::size_t index) {
  const auto product_of = [&](int lane) -> const GroupProduct& {
    return static_cast<const Groups*>(lanes[lane])->committed.front()[index];
  };
  const GroupProduct& product = product_of(0);
  const bool bytes = product.e4m3 || product.int8;
  const u32 depth = bytes ? kByteDepth : kDepth;
  float a[16][kByteDepth];
  float halves_of_a[16][kDepth];
  for (int lane = 0; lane < 32; ++lane) {
    if (!same(product, product_of(lane))) fail("lanes of a warp differ in their operands of wgmma", product.at);
    if (!product.a_in_registers) continue;
    if (bytes) {
      gather_bytes(a, lane, product_of(lane).a_own, product.int8);
    } else {
      gather_a(halves_of_a, lane, product_of(lane).a_own, product.bf16);
    }
  }
  if (product.a_in_registers && !bytes) {
    for (int r = 0; r < 16; ++r) std::memcpy(a[r], halves_of_a[r], sizeof(halves_of_a[r]));
  }
  if (!product.a_in_registers) {
    const SharedMatrix matrix(product.a, product);
    const auto first = static_cast<u32>(warp() % 4 * 16);
    for (u32 r = 0; r < 16; ++r) {
      for (u32 k = 0; k < depth; ++k) {
        a[r][k] = product.a_transposed ? matrix.across(k, first + r) : matrix.along(first + r, k);
      }
    }
  }
  const SharedMatrix matrix(product.b, product);
  float b[kByteDepth][256];
  for (u32 k = 0; k < depth; ++k) {
    for (u32 n = 0; n < static_cast<u32>(product.n); ++n) {
      b[k][n] = product.b_transposed ? matrix.across(k, n) : matrix.along(n, k);
    }
  }
  float d[16][256];
  const auto exchange = [&](auto copy) {
    for (int lane = 0; lane < 32; ++lane) {
      void* own = product_of(lane).d;
      for (int i = 0; i < product.n / 2; ++i) {
        float& all = d[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
        if (product.int8) {
          copy(static_cast<int*>(own)[i], all);
        } else {
          copy(static_cast<float*>(own)[i], all);
        }
      }
    }
  };
  if (product.add) {
    exchange([](auto own, float& all) { all = static_cast<float>(own); });
  } else {
    std::memset(d, 0, sizeof(d));
  }
  for (int r = 0; r < 16; ++r) {
    for (u32 k = 0; k < depth; ++k) {
      for (int n = 0; n < product.n; ++n) d[r][n] += a[r][k] * b[k][n];
    }
  }
  exchange([](auto& own, float all) { own = static_cast<std::remove_reference_t<decltype(own)>>(all); });
}

struct Waiting {
  Groups* groups;
  int later;
};

}  // namespace

float to_float(u32 bits, bool bf16) { return bf16 ? __builtin_bit_cast(float, bits << 16) : halves()[bits]; }

u32 from_double(double value, bool bf16) {
  if (value != value) return 0x7fff;
  if (!bf16) {
    const auto half = static_cast<_Float16>(value);
    return __builtin_bit_cast(std::uint16_t, half);
  }
  // Rounded to odd first, so that the second rounding finds on which side of the middle the value is.
  auto single = static_cast<float>(value);
  auto bits = __builtin_bit_cast(u32, single);
  if (single != value && (bits & 1) == 0) bits += (single < value) == (value > 0) ? 1U : 0xffffffffU;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void begin_products(int threads) { groups.assign(static_cast<std::size_t>(threads), {}); }

void thread_ends_with_products(Place at) {
  const Groups& own = groups[static_cast<std::size_t>(thread())];
  if (!own.begun.empty() || !own.committed.empty()) fail("ends with products of wgmma that nobody waited for", at);
}

void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16, Place at) {
  WarpProduct own{&c, &a, {b0, b1}, bf16};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place /*place*/) {
    float a_all[16][kDepth];
    float b_all[kDepth][8];
    float d[16][8];
    for (int l = 0; l < 32; ++l) {
      const auto& lane = *static_cast<const WarpProduct*>(lanes[l]);
      gather_a(a_all, l, *lane.a, lane.bf16);
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) b_all[l % 4 * 2 + i * 8 + j][l / 4] = element(lane.b[i], j, lane.bf16);
      }
      for (int i = 0; i < 4; ++i) d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] = (*lane.c)[i];
    }
    for (int r = 0; r < 16; ++r) {
      for (int k = 0; k < kDepth; ++k) {
        for (int n = 0; n < 8; ++n) d[r][n] += a_all[r][k] * b_all[k][n];
      }
    }
    for (int l = 0; l < 32; ++l) {
      const auto& lane = *static_cast<const WarpProduct*>(lanes[l]);
      for (int i = 0; i < 4; ++i) (*lane.c)[i] = d[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
    }
  };
  collect("for mma", kWholeWarp, &own, run, at);
}

namespace {

/// m16n8k32 of e4m3 with fp32 sums, or of int8, whose sums fp32 holds exactly.
template <class Number>
void multiply_bytes(Number (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at) {
  constexpr bool int8 = std::is_same_v<Number, int>;
  struct Product {
    Number (*c)[4];
    const u32 (*a)[4];
    u32 b[2];
  };
  Product own{&c, &a, {b0, b1}};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place /*place*/) {
    float a_all[16][kByteDepth];
    float b_all[kByteDepth][8];
    for (int l = 0; l < 32; ++l) {
      const auto& lane = *static_cast<const Product*>(lanes[l]);
      gather_bytes(a_all, l, *lane.a, int8);
      for (int i = 0; i < 8; ++i)
        b_all[l % 4 * 4 + i / 4 * 16 + i % 4][l / 4] = from_byte(lane.b[i / 4] >> (i % 4 * 8) & 0xff, int8);
    }
    for (int l = 0; l < 32; ++l) {
      const auto& lane = *static_cast<const Product*>(lanes[l]);
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < kByteDepth; ++k) {
          (*lane.c)[i] += static_cast<Number>(a_all[l / 4 + i / 2 * 8][k] * b_all[k][l % 4 * 2 + i % 2]);
        }
      }
    }
  };
  collect("for mma", kWholeWarp, &own, run, at);
}

}  // namespace

void mma_m16n8k32_e4m3(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at) { multiply_bytes(c, a, b0, b1, at); }
void mma_m16n8k32_int8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Place at) { multiply_bytes(c, a, b0, b1, at); }

void wgmma(const GroupProduct& product) { groups[static_cast<std::size_t>(thread())].begun.push_back(product); }

void wgmma_commit(Place /*at*/) {
  Groups& own = groups[static_cast<std::size_t>(thread())];
  own.committed.push_back(std::move(own.begun));
  own.begun.clear();
}

// Only here are the products computed, of what their operands hold now: who reads results, or releases operands, before
// the wait gets other numbers than the oracle.
void wgmma_wait(int later, Place at) {
  Waiting own{&groups[static_cast<std::size_t>(thread())], later};
  const auto run = [](void* const(&lanes)[32], u32 /*mask*/, Place place) {
    void* all[32];
    for (int l = 0; l < 32; ++l) all[l] = static_cast<const Waiting*>(lanes[l])->groups;
    const auto of = [&](int lane) -> Groups& { return *static_cast<Groups*>(all[lane]); };
    const int keep = static_cast<const Waiting*>(lanes[0])->later;
    while (static_cast<int>(of(0).committed.size()) > keep) {
      const std::size_t count = of(0).committed.front().size();
      for (int l = 0; l < 32; ++l) {
        if (of(l).committed.empty() || of(l).committed.front().size() != count) {
          fail("lanes of a warp differ in how many products they began", place);
        }
      }
      for (std::size_t i = 0; i < count; ++i) multiply(all, i);
      for (int l = 0; l < 32; ++l) of(l).committed.erase(of(l).committed.begin());
    }
  };
  collect("for wgmma", kWholeWarp, &own, run, at);
}

}  // namespace emulator
