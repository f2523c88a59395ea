// SPDX-License-Identifier: Apache-2.0
// Register-tiled matrix product. A micro-tile holds kRows × kVectors accumulators; one element of A is broadcast
// against kVectors vectors of a row of B. Every element of A·B is one chain of fused multiply-adds in the order of k,
// and the old C is added last. So results do not depend on the place of an element within a tile, and products are not
// rounded to the precision of a large C.
// Included once per instruction set: no include guard by design of foreach_target.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

using FloatTag = hn::CappedTag<float, kPad>;
using Vector = hn::Vec<FloatTag>;
constexpr std::int64_t kLanes = hn::MaxLanes(FloatTag());

// There are 24 accumulators with 32 vector registers (AVX-512, NEON), and 12 with 16 registers.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kMaxVectors = 4;
constexpr int kAccumulators = 24;
#else
constexpr int kMaxVectors = 2;
constexpr int kAccumulators = 12;
#endif

struct MatmulCall {
  std::int64_t k;
  const float* a;
  std::ptrdiff_t a_row, a_column;
  const float* b;
  std::ptrdiff_t ldb;
  float* c;
  std::ptrdiff_t ldc;
  const float* column_scale;
  bool accumulate;
};

template <int kRows, int kVectors>
HWY_INLINE void micro_tile(const MatmulCall& call) {
  const FloatTag d;
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::Zero(d);
  }
  const float* a = call.a;
  const float* b = call.b;
  const std::ptrdiff_t a_row = call.a_row;
  for (std::int64_t k = 0; k < call.k; ++k) {
    Vector row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = hn::LoadU(d, b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vector element = hn::Set(d, a[i * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(element, row[v], sum[i][v]);
    }
    a += call.a_column;
    b += call.ldb;
  }
  if (call.accumulate) {
    Vector scale[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = call.column_scale ? hn::LoadU(d, call.column_scale + v * kLanes) : hn::Set(d, 1.0F);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = hn::MulAdd(scale[v], hn::LoadU(d, call.c + i * call.ldc + v * kLanes), sum[i][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[i][v], d, call.c + i * call.ldc + v * kLanes);
  }
}

// The last rows of a column strip: the same tile with fewer rows, chosen at run time.
template <int kRows, int kVectors>
void remaining_rows(std::int64_t rows, const MatmulCall& call) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      micro_tile<kRows, kVectors>(call);
    } else {
      remaining_rows<kRows - 1, kVectors>(rows, call);
    }
  }
}

template <int kVectors>
void column_strip(std::int64_t m, MatmulCall call) {
  constexpr int kRows = kAccumulators / kVectors > 12 ? 12 : kAccumulators / kVectors;
  for (; m >= kRows; m -= kRows) {
    micro_tile<kRows, kVectors>(call);
    call.a += kRows * call.a_row;
    call.c += kRows * call.ldc;
  }
  remaining_rows<kRows - 1, kVectors>(m, call);
}

void matmul(std::int64_t m, std::int64_t n, std::int64_t k, Broadcast a, const float* b, std::ptrdiff_t ldb, float* c,
            std::ptrdiff_t ldc, bool accumulate, const float* column_scale) {
  MatmulCall call{k, a.data, a.row, a.column, b, ldb, c, ldc, column_scale, accumulate};
  const auto advance = [&](std::int64_t columns) {
    n -= columns;
    call.b += columns;
    call.c += columns;
    if (call.column_scale) call.column_scale += columns;
  };
  while (n > 0) {
    if (kMaxVectors >= 4 && n > 2 * kLanes) {  // 3 vectors that are left run as 2 and 1
      if (n >= 4 * kLanes) {
        column_strip<4>(m, call);
        advance(4 * kLanes);
        continue;
      }
    }
    if (n > kLanes) {
      column_strip<2>(m, call);
      advance(2 * kLanes);
    } else {
      column_strip<1>(m, call);
      advance(kLanes);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
