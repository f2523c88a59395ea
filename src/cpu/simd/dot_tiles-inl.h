// SPDX-License-Identifier: Apache-2.0
// The product on tiles of 16 × 16 sums (TDPBF16PS). A block is 2 × 2 tiles, so that each of the 4 tiles that a step
// loads is used twice. `Tiles` has the instructions, on registers whose numbers are known at compile time: 0 to 3 hold
// C, 4 and 5 hold rows of A (16 × 32 elements), 6 and 7 hold pairs of rows of B (16 pairs × 16 columns).
// Included where its instructions are switched on: no include guard by design.
namespace tessera::cpu {
namespace {

struct TileCall {
  std::int64_t k;
  const std::uint16_t* a;
  std::ptrdiff_t lda;  // elements
  const std::uint32_t* b;
  std::ptrdiff_t ldb;
  float* c;
  std::ptrdiff_t ldc;
  bool accumulate;
};

template <class Tiles, int kRows, int kColumns>
void dot_tile_block(const TileCall& call) {
  const std::ptrdiff_t down = kDotTile * call.ldc;
  const std::ptrdiff_t lda = call.lda * 2, ldb = call.ldb * 4, ldc = call.ldc * 4;  // bytes
  if (call.accumulate) {
    Tiles::template load<0>(call.c, ldc);
    if constexpr (kColumns == 2) Tiles::template load<1>(call.c + kDotTile, ldc);
    if constexpr (kRows == 2) Tiles::template load<2>(call.c + down, ldc);
    if constexpr (kRows == 2 && kColumns == 2) Tiles::template load<3>(call.c + down + kDotTile, ldc);
  } else {
    Tiles::template zero<0>();
    if constexpr (kColumns == 2) Tiles::template zero<1>();
    if constexpr (kRows == 2) Tiles::template zero<2>();
    if constexpr (kRows == 2 && kColumns == 2) Tiles::template zero<3>();
  }
  const std::uint16_t* a = call.a;
  const std::uint32_t* b = call.b;
  for (std::int64_t k = 0; k < call.k; k += kDotStep) {
    Tiles::template load<4>(a, lda);
    Tiles::template load<6>(b, ldb);
    Tiles::template dot<0, 4, 6>();
    if constexpr (kColumns == 2) {
      Tiles::template load<7>(b + kDotTile, ldb);
      Tiles::template dot<1, 4, 7>();
    }
    if constexpr (kRows == 2) {
      Tiles::template load<5>(a + kDotTile * call.lda, lda);
      Tiles::template dot<2, 5, 6>();
      if constexpr (kColumns == 2) Tiles::template dot<3, 5, 7>();
    }
    a += kDotStep;
    b += kDotStep / 2 * call.ldb;
  }
  Tiles::template store<0>(call.c, ldc);
  if constexpr (kColumns == 2) Tiles::template store<1>(call.c + kDotTile, ldc);
  if constexpr (kRows == 2) Tiles::template store<2>(call.c + down, ldc);
  if constexpr (kRows == 2 && kColumns == 2) Tiles::template store<3>(call.c + down + kDotTile, ldc);
}

// Computes a row of blocks, one or two tiles high: its rows of A stay in L1.
template <class Tiles, int kRows>
void dot_tile_row(std::int64_t n, TileCall call) {
  const auto advance = [&](std::int64_t columns) {
    n -= columns;
    call.b += columns;
    call.c += columns;
  };
  for (; n >= 2 * kDotTile; advance(2 * kDotTile)) dot_tile_block<Tiles, kRows, 2>(call);
  if (n > 0) dot_tile_block<Tiles, kRows, 1>(call);
}

template <class Tiles>
void dot_tiles_matmul(std::int64_t m, std::int64_t n, std::int64_t k, const std::uint16_t* a, std::ptrdiff_t lda,
                      const std::uint32_t* b, std::ptrdiff_t ldb, float* c, std::ptrdiff_t ldc, bool accumulate,
                      const float* column_scale) {
  // Tiles cannot be scaled, so C is. After the first tiles of keys a maximum seldom grows: mostly all factors are 1.
  if (accumulate && column_scale && !Tiles::all_ones(n, column_scale)) Tiles::scale(m, n, c, ldc, column_scale);
  TileCall call{k, a, lda, b, ldb, c, ldc, accumulate};
  const auto advance = [&](std::int64_t rows) {
    m -= rows;
    call.a += rows * lda;
    call.c += rows * ldc;
  };
  for (; m >= 2 * kDotTile; advance(2 * kDotTile)) dot_tile_row<Tiles, 2>(n, call);
  if (m > 0) dot_tile_row<Tiles, 1>(n, call);
}

template <class Tiles>
double dot_tiles_peak(std::int64_t rounds) {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
  Tiles::template zero<4>();
  Tiles::template zero<5>();
  Tiles::template zero<6>();
  Tiles::template zero<7>();
  for (std::int64_t round = 0; round < rounds; ++round) {
    Tiles::template dot<0, 4, 6>();
    Tiles::template dot<1, 4, 7>();
    Tiles::template dot<2, 5, 6>();
    Tiles::template dot<3, 5, 7>();
  }
  return 4.0 * 2 * kDotTile * kDotTile * kDotStep * static_cast<double>(rounds);
}

}  // namespace
}  // namespace tessera::cpu
