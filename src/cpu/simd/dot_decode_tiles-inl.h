// SPDX-License-Identifier: Apache-2.0
// The two products of few queries on rows of K and V in place, with the sums of TDPBF16PS in fp32. A step of 32
// elements is two chains of multiply-adds from 0, one over the low and one over the high elements of its 16 pairs, then
// C + (even + odd). The instruction treats subnormal inputs and results as 0, whatever the thread's modes are. A
// Lanes::Flush object makes vector instructions do the same. Products of two bf16 need no rounding. `Lanes` has the
// instructions.
// Included where its instructions are switched on: no include guard by design.
#include <hwy/base.h>

namespace tessera::cpu {
namespace {

// Adds a step to the scores of 16 keys, which are transposed in registers: lanes are keys. q (kQueries × kDotStep): a
// step of the queries; sums: (kQueries × kDecodeKeys).
template <class Lanes, int kQueries>
HWY_INLINE void add_step_of_scores(const std::byte* const* rows, std::int64_t t, const float* q, float* sums,
                                   Prefetcher& prefetcher, std::int64_t lines) {
  alignas(64) std::uint32_t pairs[kDotTile * kDotTile];
  {
    typename Lanes::Bits keys[kDotTile];  // 16 pairs of dims for each key, then 16 keys for each pair
#pragma GCC unroll 16
    for (int i = 0; i < kDotTile; ++i) keys[i] = Lanes::load(reinterpret_cast<const std::uint32_t*>(rows[i] + 2 * t));
    Lanes::transpose(keys);
#pragma GCC unroll 16
    for (int i = 0; i < kDotTile; ++i) Lanes::store(keys[i], pairs + i * kDotTile);
  }
  typename Lanes::Vector even[kQueries], odd[kQueries];
#pragma GCC unroll 8
  for (int c = 0; c < kQueries; ++c) even[c] = odd[c] = Lanes::zero();
#pragma GCC unroll 2
  for (int i = 0; i < kDotTile; ++i) {
    prefetcher.lines(lines);
    const typename Lanes::Bits both = Lanes::load(pairs + i * kDotTile);
    const typename Lanes::Vector low = Lanes::low(both), high = Lanes::high(both);
#pragma GCC unroll 8
    for (int c = 0; c < kQueries; ++c) {
      even[c] = Lanes::multiply_add(low, Lanes::broadcast(q + c * kDotStep + 2 * i), even[c]);
      odd[c] = Lanes::multiply_add(high, Lanes::broadcast(q + c * kDotStep + 2 * i + 1), odd[c]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < kQueries; ++c) {
    float* sum = sums + c * kDecodeKeys;
    Lanes::store(Lanes::add(Lanes::load(sum), Lanes::add(even[c], odd[c])), sum);
  }
}

// A separate function, so that the compiler cannot move its arithmetic out of the lifetime of a Flush.
template <class Lanes, int kQueries>
HWY_NOINLINE void decode_tile_scores_of(const std::byte* const* rows, std::int64_t dim, const std::uint16_t* q,
                                        float* sums, Prefetcher& prefetcher, std::int64_t lines) {
  alignas(64) float step[kQueries * kDotStep];
  for (std::int64_t t = 0; t < dim; t += kDotStep) {
    for (int c = 0; c < kQueries; ++c) {
      for (std::int64_t i = 0; i < kDotStep; i += kDotTile) {
        Lanes::store(Lanes::widen(reinterpret_cast<const std::byte*>(q + c * dim + t + i)), step + c * kDotStep + i);
      }
    }
    for (std::int64_t first = 0; first < kDecodeKeys; first += kDotTile) {
      add_step_of_scores<Lanes, kQueries>(rows + first, t, step, sums + first, prefetcher, lines);
    }
  }
}

template <class Lanes>
void decode_tile_scores(std::int64_t keys, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint16_t* q, float* s, const RowsAhead& ahead, Transpose transpose) {
  alignas(64) float sums[kDecodeQueries * kDecodeKeys] = {};
  Prefetcher prefetcher(ahead);
  const std::int64_t lines = lines_a_step(ahead, kDecodeKeys * dim / kDotStep);
  const std::byte* all[kDecodeKeys];
  for (std::int64_t i = 0; i < kDecodeKeys; ++i) all[i] = rows[i < keys ? i : 0];
  {
    [[maybe_unused]] const typename Lanes::Flush flush;
    const auto scores_of = queries == 1   ? decode_tile_scores_of<Lanes, 1>
                           : queries == 4 ? decode_tile_scores_of<Lanes, 4>
                                          : decode_tile_scores_of<Lanes, 8>;
    scores_of(all, dim, q, sums, prefetcher, lines);
  }
  prefetcher.rest();
  put_decode_scores(queries, sums, s, transpose);
}

// Lanes are dims; weights: (kDotStep × kQueries).
template <class Lanes, int kQueries, int kVectors>
HWY_INLINE void add_step_of_values(const std::byte* const* rows, std::int64_t first, std::int64_t dim,
                                   const float* weights, float* o, Prefetcher& prefetcher, std::int64_t lines) {
  typename Lanes::Vector sum[2][kQueries][kVectors];  // of even and odd keys
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 4
    for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[odd][c][v] = Lanes::zero();
    }
  }
  for (std::int64_t key = 0; key < kDotStep; key += 2) {
    prefetcher.lines(lines);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      typename Lanes::Vector value[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) value[v] = Lanes::widen(rows[key + odd] + 2 * (first + v * kDotTile));
#pragma GCC unroll 4
      for (int c = 0; c < kQueries; ++c) {
        const typename Lanes::Vector weight = Lanes::broadcast(weights + (key + odd) * kQueries + c);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[odd][c][v] = Lanes::multiply_add(value[v], weight, sum[odd][c][v]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kQueries; ++c) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* at = o + c * dim + first + v * kDotTile;
      Lanes::store(Lanes::add(Lanes::load(at), Lanes::add(sum[0][c][v], sum[1][c][v])), at);
    }
  }
}

// How many vectors a pass sums: as many as fit in registers with their chains.
inline constexpr int decode_tile_vectors(std::int64_t queries) { return queries == 1 ? 4 : 2; }

template <class Lanes, int kQueries>
HWY_NOINLINE void decode_tile_values_of(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim,
                                        const std::uint32_t* p, float* o, Prefetcher& prefetcher, std::int64_t lines) {
  constexpr int kVectors = decode_tile_vectors(kQueries);
  alignas(64) std::uint32_t bits[kDotStep * kQueries];
  alignas(64) float weights[kDotStep * kQueries];
  for (std::int64_t step = 0; step < pairs; step += kDotStep / 2, rows += kDotStep, p += kDotStep / 2 * kPanel) {
    for (std::int64_t t = 0; t < kDotStep / 2; ++t) {
      for (std::int64_t c = 0; c < kQueries; ++c) {
        bits[2 * t * kQueries + c] = p[t * kPanel + c] << 16U;
        bits[(2 * t + 1) * kQueries + c] = p[t * kPanel + c] & 0xFFFF0000U;
      }
    }
    __builtin_memcpy(weights, bits, sizeof weights);
    std::int64_t first = 0;
    for (; first + kVectors * kDotTile <= dim; first += kVectors * kDotTile) {
      add_step_of_values<Lanes, kQueries, kVectors>(rows, first, dim, weights, o, prefetcher, lines);
    }
    for (; first < dim; first += kDotTile) {
      add_step_of_values<Lanes, kQueries, 1>(rows, first, dim, weights, o, prefetcher, lines);
    }
  }
}

template <class Lanes>
void decode_tile_values(std::int64_t pairs, const std::byte* const* rows, std::int64_t dim, std::int64_t queries,
                        const std::uint32_t* p, float* o, const RowsAhead& ahead) {
  Prefetcher prefetcher(ahead);
  const std::int64_t width = decode_tile_vectors(queries) * kDotTile;
  const std::int64_t passes = (dim / width + dim % width / kDotTile) * (queries == 1 ? 1 : queries / 4);
  const std::int64_t lines = lines_a_step(ahead, pairs * passes);
  {
    [[maybe_unused]] const typename Lanes::Flush flush;
    if (queries == 1) {
      decode_tile_values_of<Lanes, 1>(pairs, rows, dim, p, o, prefetcher, lines);
    } else {
      for (std::int64_t c = 0; c < queries; c += 4) {
        decode_tile_values_of<Lanes, 4>(pairs, rows, dim, p + c, o + c * dim, prefetcher, lines);
      }
    }
  }
  prefetcher.rest();
}

}  // namespace
}  // namespace tessera::cpu
