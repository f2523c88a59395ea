// SPDX-License-Identifier: Apache-2.0
// The product with VDPBF16PS: each lane adds both products of two pairs at once. A micro-tile holds kRows × kVectors
// accumulators; a pair of A is broadcast against kVectors vectors of pairs of B.
// `Pairs` has the instruction: Vector, Bits, zero, load, store, multiply, broadcast and dot.
// Included where its instructions are switched on: no include guard by design.
namespace tessera::cpu {
namespace {

struct DotCall {
  std::int64_t k;
  const std::uint16_t* a;
  std::ptrdiff_t lda;
  const std::uint32_t* b;
  std::ptrdiff_t ldb;
  float* c;
  std::ptrdiff_t ldc;
  const float* column_scale;
  bool accumulate;
};

template <class Pairs, int kRows, int kVectors>
void dot_micro_tile(const DotCall& call) {
  // Every loop over sums is unrolled: otherwise the compiler would keep all of them in memory.
  typename Pairs::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = call.accumulate ? Pairs::load(call.c + i * call.ldc + v * kDotTile) : Pairs::zero();
    }
  }
  if (call.accumulate && call.column_scale) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const typename Pairs::Vector scale = Pairs::load(call.column_scale + v * kDotTile);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i][v] = Pairs::multiply(sum[i][v], scale);
    }
  }
  const std::uint32_t* b = call.b;
  for (std::int64_t k = 0; k < call.k; k += 2) {
    typename Pairs::Bits row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = Pairs::load(b + v * kDotTile);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const typename Pairs::Bits pair = Pairs::broadcast(call.a + i * call.lda + k);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Pairs::dot(sum[i][v], pair, row[v]);
    }
    b += call.ldb;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Pairs::store(sum[i][v], call.c + i * call.ldc + v * kDotTile);
  }
}

// m is a multiple of 16. Micro-tiles of 4 vectors have 6 rows and leave 0, 2 or 4; those of fewer vectors have 8 rows.
template <class Pairs, int kVectors>
void dot_column_strip(std::int64_t m, DotCall call) {
  constexpr int kRows = kVectors == 4 ? 6 : 8;
  const auto advance = [&](std::int64_t rows) {
    m -= rows;
    call.a += rows * call.lda;
    call.c += rows * call.ldc;
  };
  for (; m >= kRows; advance(kRows)) dot_micro_tile<Pairs, kRows, kVectors>(call);
  for (; m >= 4; advance(4)) dot_micro_tile<Pairs, 4, kVectors>(call);
  for (; m > 0; advance(2)) dot_micro_tile<Pairs, 2, kVectors>(call);
}

template <class Pairs>
void dot_vectors_matmul(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a, std::ptrdiff_t lda,
                        const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                        const float* column_scale) {
  DotCall call{k, a, lda, b, ldb, c, ldc, column_scale, accumulate};
  while (n > 0) {
    const std::int64_t columns = n >= 4 * kDotTile ? 4 * kDotTile : n >= 2 * kDotTile ? 2 * kDotTile : kDotTile;
    if (columns == 4 * kDotTile) {
      dot_column_strip<Pairs, 4>(m, call);
    } else if (columns == 2 * kDotTile) {
      dot_column_strip<Pairs, 2>(m, call);
    } else {
      dot_column_strip<Pairs, 1>(m, call);
    }
    n -= columns;
    call.b += columns;
    call.c += columns;
    if (call.column_scale) call.column_scale += columns;
  }
}

template <class Pairs>
double dot_vectors_peak(std::int64_t rounds) {
  constexpr int kSums = 24;
  const std::uint16_t tiny[2] = {1, 1};  // subnormal, so that the sums do not change
  const typename Pairs::Bits a = Pairs::broadcast(tiny);
  // If all sums started equal, the compiler would merge them.
  float start[kSums * kDotTile];
  for (int i = 0; i < kSums * kDotTile; ++i) start[i] = static_cast<float>(i);
  typename Pairs::Vector sum[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sum[i] = Pairs::load(start + i * kDotTile);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (auto& each : sum) each = Pairs::dot(each, a, a);
  }
  float lanes[kDotTile];
  double total = 2.0 * 2 * kDotTile * kSums * static_cast<double>(rounds);
#pragma GCC unroll 24
  for (const auto& each : sum) {
    Pairs::store(each, lanes);
    total += lanes[0];  // so that no sum is dropped
  }
  return total;
}

}  // namespace
}  // namespace tessera::cpu
