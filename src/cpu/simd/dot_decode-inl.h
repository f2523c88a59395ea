// SPDX-License-Identifier: Apache-2.0
// The two products of few queries with VDPBF16PS, on rows of K and V in place. Every sum adds the same pairs in the
// same order as in dot_vectors-inl.h. `Pairs` has the instructions, including interleave.
// Included where its instructions are switched on: no include guard by design.
namespace tessera::cpu {
namespace {

// Computes the scores of 16 keys, which are transposed in registers: lanes are keys. sums: (kQueries × kDecodeKeys).
template <class Pairs, int kQueries>
void dot_scores_of_tile(const std::byte* const* rows, std::int64_t dim, const std::uint16_t* q, float* sums,
                        Prefetcher& prefetcher, std::int64_t lines) {
  typename Pairs::Vector sum[kQueries];
#pragma GCC unroll 8
  for (int c = 0; c < kQueries; ++c) sum[c] = Pairs::zero();
  for (std::int64_t t = 0; t < dim; t += kDotStep) {
    typename Pairs::Bits keys[kDotTile];  // 16 pairs of dims for each key, then 16 keys for each pair
#pragma GCC unroll 16
    for (int i = 0; i < kDotTile; ++i) keys[i] = Pairs::load(reinterpret_cast<const std::uint32_t*>(rows[i] + 2 * t));
    Pairs::transpose(keys);
#pragma GCC unroll 16
    for (int i = 0; i < kDotTile; ++i) {
      prefetcher.lines(lines);
#pragma GCC unroll 8
      for (int c = 0; c < kQueries; ++c) {
        sum[c] = Pairs::dot(sum[c], keys[i], Pairs::broadcast(q + c * dim + t + 2 * i));
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kQueries; ++c) Pairs::store(sum[c], sums + c * kDecodeKeys);
}

template <class Pairs>
void dot_decode_scores(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                       const std::uint16_t* q, float* s, const RowsAhead& ahead, Transpose transpose) {
  alignas(64) float sums[kDecodeQueries * kDecodeKeys];
  Prefetcher prefetcher(ahead);
  const std::int64_t lines = lines_a_step(ahead, kDecodeKeys * dim / kDotStep);
  const std::byte* all[kDecodeKeys];
  for (std::int64_t i = 0; i < kDecodeKeys; ++i) all[i] = rows[i < keys ? i : 0];
  for (std::int64_t first = 0; first < kDecodeKeys; first += kDotTile) {
    const auto scores_of_tile = queries == 1   ? dot_scores_of_tile<Pairs, 1>
                                : queries == 4 ? dot_scores_of_tile<Pairs, 4>
                                               : dot_scores_of_tile<Pairs, 8>;
    scores_of_tile(all + first, dim, q, sums + first, prefetcher, lines);
  }
  prefetcher.rest();
  put_decode_scores(queries, sums, s, transpose);
}

// Lanes are dims.
template <class Pairs, int kQueries, int kVectors>
void dot_sums_of_values(std::int64_t pairs, const std::byte* const* rows, std::int64_t first, std::int64_t dim,
                        const std::uint32_t* p, float* o, Prefetcher& prefetcher, std::int64_t lines) {
  typename Pairs::Vector sum[kQueries][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[c][v] = Pairs::load(o + c * dim + first + v * kDotTile);
  }
  for (std::int64_t t = 0; t < pairs; ++t) {
    prefetcher.lines(lines);
    typename Pairs::Bits value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t byte = 2 * (first + v * kDotTile);
      value[v] = Pairs::interleave(rows[2 * t] + byte, rows[2 * t + 1] + byte);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueries; ++c) {
      const typename Pairs::Bits weight = Pairs::broadcast(reinterpret_cast<const std::uint16_t*>(p + t * kPanel + c));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[c][v] = Pairs::dot(sum[c][v], value[v], weight);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Pairs::store(sum[c][v], o + c * dim + first + v * kDotTile);
  }
}

template <class Pairs, int kQueries>
void dot_values_of_queries(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim, const std::uint32_t* p,
                           float* o, Prefetcher& prefetcher, std::int64_t lines) {
  std::int64_t t = 0;
  for (; t + 4 * kDotTile <= dim; t += 4 * kDotTile) {
    dot_sums_of_values<Pairs, kQueries, 4>(pairs, rows, t, dim, p, o, prefetcher, lines);
  }
  for (; t < dim; t += kDotTile) dot_sums_of_values<Pairs, kQueries, 1>(pairs, rows, t, dim, p, o, prefetcher, lines);
}

template <class Pairs>
void dot_decode_values(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                       const std::uint32_t* p, float* o, const RowsAhead& ahead) {
  Prefetcher prefetcher(ahead);
  const std::int64_t passes = dim / (4 * kDotTile) + dim % (4 * kDotTile) / kDotTile;
  const std::int64_t lines = lines_a_step(ahead, pairs * passes * (queries == 1 ? 1 : queries / 4));
  if (queries == 1) {
    dot_values_of_queries<Pairs, 1>(pairs, rows, dim, p, o, prefetcher, lines);
  } else {
    for (std::int64_t c = 0; c < queries; c += 4) {
      dot_values_of_queries<Pairs, 4>(pairs, rows, dim, p + c, o + c * dim, prefetcher, lines);
    }
  }
  prefetcher.rest();
}

}  // namespace
}  // namespace tessera::cpu
