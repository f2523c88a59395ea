// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries, as in decoding: every key is used a few times only, so rows of K and V are read where
// they lie, and the rows to come are asked for in time. Every sum is that of the panels, to the bit. Included once per
// instruction set, after rows-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

constexpr int kQueriesAtOnce = 4;

// Into L2: L1 has room for few lines under way.
HWY_INLINE void ask_for_line(const std::byte* line) { __builtin_prefetch(line, 0, 2); }

// Asks for a row; a line is 64 bytes.
template <class T>
HWY_INLINE void ask_for(const std::byte* row, std::int64_t dim) {
  for (std::int64_t byte = 0; byte < dim * static_cast<std::int64_t>(sizeof(T)); byte += 64) {
    ask_for_line(row + byte);
  }
}

// Lanes are keys: kKeys of them against 4 queries, each sum the chain over the dims that matmul makes of it.
constexpr std::int64_t kKeys = 2 * kPad;

// Meanwhile the `wanted` next rows are asked for, a line or two for each dim.
template <class T>
HWY_INLINE void scores_of_keys(const float* turned, std::int64_t dim, const float* q, std::ptrdiff_t ldq, float* sums,
                               const std::byte* const* next, std::int64_t wanted) {
  const FloatTag d;
  std::int64_t row = 0, byte = 0;
  constexpr int kVectors = kMaxVectors / 2;  // with 4 queries 8 or 4 accumulators
  for (std::int64_t key = 0; key < kKeys; key += kVectors * kLanes) {
    Vector sum[kQueriesAtOnce][kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::Zero(d);
    }
    for (std::int64_t t = 0; t < dim; ++t) {
      Vector keys[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) keys[v] = hn::LoadU(d, turned + t * kKeys + key + v * kLanes);
      for (std::size_t line = 0; line < sizeof(T) / 2 && row < wanted; ++line) {
        ask_for_line(next[row] + byte);
        byte += 64;
        if (byte >= dim * static_cast<std::int64_t>(sizeof(T))) {
          byte = 0;
          ++row;
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < kQueriesAtOnce; ++c) {
        const Vector query = hn::Set(d, q[c * ldq + t]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(keys[v], query, sum[c][v]);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[c][v], d, sums + c * kKeys + key + v * kLanes);
    }
  }
}

template <class T>
void few_scores_as(std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                   std::int64_t queries, const float* q, std::ptrdiff_t ldq, float* scratch, float* s) {
  float* turned = scratch + kKeys * dim;
  alignas(64) float sums[kPad * kKeys] = {};  // (queries, keys)
  alignas(64) float columns[kKeys * kPad];
  for (std::int64_t first = 0; first < keys; first += kKeys) {
    const std::int64_t count = keys - first < kKeys ? keys - first : kKeys;
    for (std::int64_t i = 0; i < kKeys; ++i) {
      load_row_as<T>(rows[first + (i < count ? i : 0)], dim, 1.0F, scratch + i * dim, dim);
    }
    transpose(kKeys, dim, scratch, dim, turned, kKeys);
    const std::int64_t rest = keys - first - count + more;
    for (std::int64_t c = 0; c < queries; c += kQueriesAtOnce) {
      const std::int64_t wanted = c > 0 ? 0 : rest < kKeys ? rest : kKeys;
      scores_of_keys<T>(turned, dim, q + c * ldq, ldq, sums + c * kKeys, rows + first + count, wanted);
    }
    transpose(kPad, kKeys, sums, kKeys, columns, kPad);
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(s + (first + i) * kPanel, columns + i * kPad, kPad * sizeof(float));
    }
  }
}

template <int kVectors, class T>
HWY_INLINE void sums_of_values(std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t first,
                               std::int64_t dim, bool ask, const float* s, const float* correction, float* o) {
  const FloatTag d;
  Vector sum[kQueriesAtOnce][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[c][v] = hn::Mul(hn::Set(d, correction[c]), hn::LoadU(d, o + c * dim + first + v * kLanes));
    }
  }
  for (std::int64_t i = 0; i < keys; ++i) {
    if (ask && i + kKeys < keys + more) ask_for<T>(rows[i + kKeys], dim);
    Vector value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_as_float(reinterpret_cast<const T*>(rows[i]) + first + v * kLanes);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kQueriesAtOnce; ++c) {
      const Vector weight = hn::Set(d, s[i * kPanel + c]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[c][v] = hn::MulAdd(value[v], weight, sum[c][v]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kQueriesAtOnce; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[c][v], d, o + c * dim + first + v * kLanes);
  }
}

template <class T>
void few_values_as(std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                   std::int64_t queries, const float* s, const float* correction, float* o) {
  for (std::int64_t c = 0; c < queries; c += kQueriesAtOnce) {
    const auto sums = [&](auto vectors, std::int64_t t) {
      sums_of_values<vectors(), T>(keys, more, rows, t, dim, c + t == 0, s + c, correction + c, o + c * dim);
    };
    std::int64_t t = 0;
    for (; t + kMaxVectors * kLanes <= dim; t += kMaxVectors * kLanes) {
      sums(std::integral_constant<int, kMaxVectors>(), t);
    }
    for (; t < dim; t += kLanes) sums(std::integral_constant<int, 1>(), t);
  }
}

template <class Task>
void with_number_of(DType dtype, const Task& task) {
  if (dtype == DType::fp32) {
    task(float());
  } else if (dtype == DType::bf16) {
    task(hwy::bfloat16_t());
  } else {
    task(hwy::float16_t());
  }
}

void few_scores(DType dtype, std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                std::int64_t queries, const float* q, std::ptrdiff_t ldq, float* scratch, float* s) {
  with_number_of(
      dtype, [&](auto number) { few_scores_as<decltype(number)>(keys, more, rows, dim, queries, q, ldq, scratch, s); });
}

void few_values(DType dtype, std::int64_t keys, std::int64_t more, const std::byte* const* rows, std::int64_t dim,
                std::int64_t queries, const float* s, const float* correction, float* scratch, float* o) {
  transpose(dim, kPad, o, kPanel, scratch, dim);
  with_number_of(dtype, [&](auto number) {
    few_values_as<decltype(number)>(keys, more, rows, dim, queries, s, correction, scratch);
  });
  transpose(kPad, dim, scratch, dim, o, kPanel);
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
