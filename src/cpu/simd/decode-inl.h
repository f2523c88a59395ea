// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries, as in decoding: every key is used only a few times, so rows of K and V are read in place,
// and the next rows are prefetched meanwhile. Every sum equals that of the panels bit for bit. Included once per
// instruction set, after rows-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

// Adds kPad more dims to sums (queries × kDecodeKeys). Lanes are keys; a sum is a chain of FMAs over dims, as in
// matmul.
template <int kQueries>
HWY_INLINE void add_scores(const float* transposed, const float* q, std::ptrdiff_t ldq, float* sums,
                           Prefetcher& prefetcher, std::int64_t lines) {
  const FloatTag d;
  constexpr int kVectors = kMaxVectors / 2;  // with 4 queries 8 or 4 accumulators
  for (std::int64_t key = 0; key < kDecodeKeys; key += kVectors * kLanes) {
    Vector sum[kQueries][kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::LoadU(d, sums + c * kDecodeKeys + key + v * kLanes);
    }
#pragma GCC unroll 4
    for (std::int64_t t = 0; t < kPad; ++t) {
      prefetcher.lines(lines);
      Vector keys[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) keys[v] = hn::LoadU(d, transposed + t * kDecodeKeys + key + v * kLanes);
#pragma GCC unroll 4
      for (int c = 0; c < kQueries; ++c) {
        const Vector query = hn::Set(d, q[c * ldq + t]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(keys[v], query, sum[c][v]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[c][v], d, sums + c * kDecodeKeys + key + v * kLanes);
    }
  }
}

HWY_INLINE std::int64_t score_passes(std::int64_t queries) {
  return kDecodeKeys / (kMaxVectors / 2 * kLanes) * (queries == 1 ? 1 : queries / 4);
}

template <class T>
void decode_scores_as(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                      const float* q, float* s, const RowsAhead& ahead) {
  const FloatTag d;
  constexpr std::int64_t kDims = 8 * kPad;      // dims that are copied together
  alignas(64) float part[kDecodeKeys * kDims];  // of the rows
  alignas(64) float transposed[kPad * kDecodeKeys];
  alignas(64) float sums[kDecodeQueries * kDecodeKeys] = {};  // (queries, keys)
  Prefetcher prefetcher(ahead);
  const std::int64_t lines = lines_a_step(ahead, dim * score_passes(queries));
  for (std::int64_t t = 0; t < dim; t += kPad) {
    if (t % kDims == 0) {
      const std::int64_t dims = dim - t < kDims ? dim - t : kDims;
      for (std::int64_t i = 0; i < kDecodeKeys; ++i) {
        const T* row = reinterpret_cast<const T*>(rows[i < keys ? i : 0]) + t;
        for (std::int64_t j = 0; j < dims; j += kLanes) hn::StoreU(load_as_float(row + j), d, part + i * kDims + j);
      }
    }
    transpose(kDecodeKeys, kPad, part + t % kDims, kDims, transposed, kDecodeKeys);
    if (queries == 1) {
      add_scores<1>(transposed, q + t, dim, sums, prefetcher, lines);
    } else {
      for (std::int64_t c = 0; c < queries; c += 4) {
        add_scores<4>(transposed, q + c * dim + t, dim, sums + c * kDecodeKeys, prefetcher, lines);
      }
    }
  }
  prefetcher.rest();
  put_decode_scores(queries, sums, s, transpose);
}

template <int kQueries, int kVectors, class T>
HWY_INLINE void sums_of_values(std::int64_t keys, const std::byte* const* rows, std::int64_t first, std::int64_t dim,
                               const float* s, float* o, Prefetcher& prefetcher, std::int64_t lines) {
  const FloatTag d;
  Vector sum[kQueries][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::LoadU(d, o + c * dim + first + v * kLanes);
  }
  for (std::int64_t i = 0; i < keys; ++i) {
    prefetcher.lines(lines);
    Vector value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_as_float(reinterpret_cast<const T*>(rows[i]) + first + v * kLanes);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueries; ++c) {
      const Vector weight = hn::Set(d, s[i * kPanel + c]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(value[v], weight, sum[c][v]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[c][v], d, o + c * dim + first + v * kLanes);
  }
}

template <int kQueries, class T>
void decode_values_as(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, const float* s, float* o,
                      Prefetcher& prefetcher, std::int64_t lines) {
  std::int64_t t = 0;
  for (; t + kMaxVectors * kLanes <= dim; t += kMaxVectors * kLanes) {
    sums_of_values<kQueries, kMaxVectors, T>(keys, rows, t, dim, s, o, prefetcher, lines);
  }
  for (; t < dim; t += kLanes) sums_of_values<kQueries, 1, T>(keys, rows, t, dim, s, o, prefetcher, lines);
}

void decode_scores(DType dtype, std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                   const float* q, float* s, const RowsAhead& ahead) {
  with_number_of(dtype,
                 [&](auto number) { decode_scores_as<decltype(number)>(keys, rows, dim, queries, q, s, ahead); });
}

void decode_values(DType dtype, std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                   const float* s, float* o, const RowsAhead& ahead) {
  Prefetcher prefetcher(ahead);
  constexpr std::int64_t kPass = kMaxVectors * kLanes;
  const std::int64_t passes = (dim / kPass + dim % kPass / kLanes) * (queries == 1 ? 1 : queries / 4);
  const std::int64_t lines = lines_a_step(ahead, keys * passes);
  with_number_of(dtype, [&](auto number) {
    using T = decltype(number);
    if (queries == 1) {
      decode_values_as<1, T>(keys, rows, dim, s, o, prefetcher, lines);
    } else {
      for (std::int64_t c = 0; c < queries; c += 4) {
        decode_values_as<4, T>(keys, rows, dim, s + c, o + c * dim, prefetcher, lines);
      }
    }
  });
  prefetcher.rest();
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
