// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries, as in decoding: every key is used a few times only, so rows of K and V are read where they
// lie, and the rows to come are asked for in time. Vectors run along the dims.
// Included once per instruction set, after rows-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

constexpr int kQueriesAtOnce = 4;
constexpr std::int64_t kRowsAhead = 16;  // 4 to 8 KiB at dim 128

// Asks for a row; a line is 64 bytes.
template <class T>
HWY_INLINE void ask_for(const std::byte* row, std::int64_t dim) {
  for (std::int64_t byte = 0; byte < dim * static_cast<std::int64_t>(sizeof(T)); byte += 64) {
    hwy::Prefetch(row + byte);
  }
}

// The sums of the lanes of 4 vectors, side by side.
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store_sums(const Vector* sum, float* to) {
  for (int c = 0; c < kQueriesAtOnce; ++c) to[c] = hn::GetLane(sum[c]);
}
#else
template <class D>
HWY_INLINE void store_block_sum(D d, hn::Vec<D> v, float* to) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    hn::StoreU(v, d, to);
  } else {
    const hn::Half<D> half;
    store_block_sum(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), to);
  }
}

HWY_INLINE void store_sums(const Vector* sum, float* to) {
  const FloatTag d;
  const hn::Repartition<double, FloatTag> dd;
  const auto fold = [&](Vector a, Vector b) { return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
  const auto low = hn::BitCast(dd, fold(sum[0], sum[1]));
  const auto high = hn::BitCast(dd, fold(sum[2], sum[3]));
  const Vector lower = hn::BitCast(d, hn::InterleaveLower(dd, low, high));
  const Vector upper = hn::BitCast(d, hn::InterleaveUpper(dd, low, high));
  store_block_sum(d, hn::Add(lower, upper), to);
}
#endif

template <int kKeys, class T>
HWY_INLINE void scores_of_keys(const std::byte* const* rows, std::int64_t dim, const float* q, std::ptrdiff_t ldq,
                               float* s) {
  const FloatTag d;
  Vector sum[kKeys][kQueriesAtOnce];
#pragma GCC unroll 4
  for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) sum[i][c] = hn::Zero(d);
  }
  for (std::int64_t t = 0; t < dim; t += kLanes) {
    Vector key[kKeys];
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) key[i] = load_as_float(reinterpret_cast<const T*>(rows[i]) + t);
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) {
      const Vector query = hn::LoadU(d, q + c * ldq + t);
#pragma GCC unroll 4
      for (int i = 0; i < kKeys; ++i) sum[i][c] = hn::MulAdd(query, key[i], sum[i][c]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kKeys; ++i) store_sums(sum[i], s + i * kPanel);
}

template <class T>
void few_scores_as(std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                   std::int64_t queries, const float* q, std::ptrdiff_t ldq, float* s) {
  constexpr int kKeys = kMaxVectors;  // with 4 queries half of the registers and more
  const FloatTag d;
  for (std::int64_t i = 0; i < keys;) {
    const std::int64_t count = i + kKeys <= keys ? kKeys : 1;
    for (std::int64_t ahead = i + kRowsAhead; ahead < i + kRowsAhead + count && ahead < keys + more; ++ahead) {
      ask_for<T>(rows[ahead], dim);
    }
    for (std::int64_t row = i; row < i + count; ++row) {
      for (std::int64_t c = 0; c < kPad; c += kLanes) hn::StoreU(hn::Zero(d), d, s + row * kPanel + c);
    }
    for (std::int64_t c = 0; c < queries; c += kQueriesAtOnce) {
      if (count == kKeys) {
        scores_of_keys<kKeys, T>(rows + i, dim, q + c * ldq, ldq, s + i * kPanel + c);
      } else {
        scores_of_keys<1, T>(rows + i, dim, q + c * ldq, ldq, s + i * kPanel + c);
      }
    }
    i += count;
  }
}

template <int kVectors, class T>
HWY_INLINE void sums_of_values(std::int64_t keys, const std::byte* const* rows, std::int64_t first, std::int64_t dim,
                               bool ask, const float* s, float* out, std::ptrdiff_t ldo) {
  const FloatTag d;
  Vector sum[kQueriesAtOnce][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::Zero(d);
  }
  for (std::int64_t i = 0; i < keys; ++i) {
    if (ask && i + kRowsAhead < keys) ask_for<T>(rows[i + kRowsAhead], dim);
    Vector value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_as_float(reinterpret_cast<const T*>(rows[i]) + first + v * kLanes);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) {
      const Vector weight = hn::Set(d, s[i * kPanel + c]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(weight, value[v], sum[c][v]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[c][v], d, out + c * ldo + first + v * kLanes);
  }
}

template <class T>
void few_values_as(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                   const float* s, float* out) {
  for (std::int64_t c = 0; c < queries; c += kQueriesAtOnce) {
    std::int64_t t = 0;
    for (; t + kMaxVectors * kLanes <= dim; t += kMaxVectors * kLanes) {
      sums_of_values<kMaxVectors, T>(keys, rows, t, dim, c + t == 0, s + c, out + c * dim, dim);
    }
    for (; t < dim; t += kLanes) sums_of_values<1, T>(keys, rows, t, dim, c + t == 0, s + c, out + c * dim, dim);
  }
}

void few_scores(DType dtype, std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                std::int64_t queries, const float* q, std::ptrdiff_t ldq, float* s) {
  const auto as = [&](auto number) { few_scores_as<decltype(number)>(keys, more, rows, dim, queries, q, ldq, s); };
  if (dtype == DType::fp32) {
    as(float());
  } else if (dtype == DType::bf16) {
    as(hwy::bfloat16_t());
  } else {
    as(hwy::float16_t());
  }
}

void few_values(DType dtype, std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                const float* s, const float* correction, float* scratch, float* o) {
  const FloatTag d;
  std::memset(scratch, 0, static_cast<std::size_t>(kPad * dim) * sizeof(float));
  const auto as = [&](auto number) { few_values_as<decltype(number)>(keys, rows, dim, queries, s, scratch); };
  if (dtype == DType::fp32) {
    as(float());
  } else if (dtype == DType::bf16) {
    as(hwy::bfloat16_t());
  } else {
    as(hwy::float16_t());
  }
  float* turned = scratch + kPad * dim;
  transpose(kPad, dim, scratch, dim, turned, kPad);
  for (std::int64_t c = 0; c < kPad; c += kLanes) {
    const Vector scale = hn::LoadU(d, correction + c);
    for (std::int64_t t = 0; t < dim; ++t) {
      float* at = o + t * kPanel + c;
      hn::StoreU(hn::MulAdd(scale, hn::LoadU(d, at), hn::LoadU(d, turned + t * kPad + c)), d, at);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
