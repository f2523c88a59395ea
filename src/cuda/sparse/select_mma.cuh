// SPDX-License-Identifier: Apache-2.0
// Products of scoring vectors with a tile of 64 compressed keys by tensor cores. A vector that is a row of q has 16-bit
// elements. A sum or a mean of rows is scaled by a power of two, so that its largest magnitude is in [1, 2), and split
// into 16-bit terms that add up to it. So products are as exact as in fp32.
#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/sparse/select_products.cuh"
#include "cuda/tile/gemm_mma.cuh"

namespace tessera::cuda {

template <SelectConfig C>
struct SelectProducts<C, true> {
  static constexpr int kKeys = SelectConfig::kKeys;
  static constexpr int kChunks = C.d / 8;  // of a row
  static constexpr int kRowWarps = C.rows / 16;
  static constexpr int kWarpKeys = kKeys / (SelectConfig::kWarps / kRowWarps);
  static constexpr int kVectors = divide_up(C.rows * kChunks, C.threads());  // of a thread
  using QueryTile = SharedTile<C.q, C.rows, C.d>;
  using KeyTile = SharedTile<C.k, kKeys, C.d>;

  const SelectWork& work;
  char* queries;   // a tile for each term
  char* keys;      // stages
  float* scores;   // (rows, SelectConfig::kPitch)
  int end = 0;     // of the keys that some row sees
  float* factors;  // (rows)
  int* largest;    // (rows): bits of the largest magnitude
  int asked = -1;  // the first of the keys in flight
  int stage = 0;

  __device__ __forceinline__ SelectProducts(const SelectWork& of, char* memory)
      : work(of),
        queries(memory),
        keys(memory + C.query_bytes(0)),
        scores(reinterpret_cast<float*>(keys + C.key_bytes())),
        factors(reinterpret_cast<float*>(reinterpret_cast<char*>(scores) + C.score_bytes())),
        largest(reinterpret_cast<int*>(factors + C.rows)) {}

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }

  /// Loads vectors [first, first + count) for multiply(); rows behind them are 0.
  __device__ __forceinline__ void load_queries(int first, int count) {
    RowVector<C.q, 8> x[kVectors];
    __syncthreads();
    if constexpr (C.terms > 1) {
      if (thread() < C.rows) largest[thread()] = 0;
      __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int row = (v * C.threads() + thread()) / kChunks;
      const int column = (v * C.threads() + thread()) % kChunks * 8;
#pragma unroll
      for (float& number : x[v].at) number = 0.0F;
      if (row >= count || column >= work.p.d) continue;
      x[v] = load_query<C>(work, first + row, column);
      if constexpr (C.terms > 1) {
        int most = 0;
#pragma unroll
        for (const float number : x[v].at) most = max(most, __float_as_int(fabsf(number)));
        atomicMax(&largest[row], most);
      }
    }
    if constexpr (C.terms > 1) __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int row = (v * C.threads() + thread()) / kChunks;
      const int chunk = (v * C.threads() + thread()) % kChunks;
      if (row < C.rows) store_terms(x[v], row, chunk);
    }
  }

  __device__ __forceinline__ void store_terms(RowVector<C.q, 8>& x, int row, int chunk) const {
    char* to = queries + QueryTile::at(row, chunk);
    if constexpr (C.terms == 1) {
      x.store(to);
    } else {
      // There is no such power if the largest magnitude is 0, subnormal, near the end of fp32 or not finite.
      const int exponent = largest[row] & 0x7f800000;
      const bool scales = exponent > 0 && exponent < 253 << 23;
      const float down = scales ? __int_as_float((254 << 23) - exponent) : 1.0F;
      if (chunk == 0) factors[row] = scales ? __int_as_float(exponent) : 1.0F;
#pragma unroll
      for (float& number : x.at) number *= down;
#pragma unroll
      for (int term = 0; term < C.terms; ++term) {
        x.store(to + term * QueryTile::bytes);
        RowVector<C.q, 8> rounded;
        rounded.load(to + term * QueryTile::bytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float rest = x.at[i] - rounded.at[i];
          x.at[i] = rest == rest ? rest : 0.0F;  // a number that is not finite has one term
        }
      }
    }
  }

  /// Multiplies the vectors by the 64 keys from `first_key` on. `next`: the first key of the next call, or −1 if it is
  /// not known. The copies of the next keys are issued here.
  __device__ __forceinline__ void multiply(int first_key, int next) {
    if (asked != first_key) {
      __syncthreads();  // no warp reads keys any more
      ask(first_key, stage);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (C.stages > 1 && next >= 0) ask(next, stage ^ 1);
    // Tensor cores accumulate with truncation. So products of the first terms and the smaller ones of further terms
    // have accumulators of their own.
    Accumulator<1, kWarpKeys / 8> sum, rest;
    sum.clear();
    rest.clear();
    const int lane = thread() % 32;
    const int first_row = thread() / 32 % kRowWarps * 16;
    const int first = thread() / 32 / kRowWarps * kWarpKeys;
    const u32 rows = rows_address<QueryTile>(ptx::shared_address(queries), first_row, lane);
    const u32 columns =
        keys_address<KeyTile>(ptx::shared_address(keys) + static_cast<u32>(stage * KeyTile::bytes), lane) +
        static_cast<u32>(first * KeyTile::row_bytes);
#pragma unroll 2
    for (int k = 0; k < C.d / 16; ++k) {
      u32 b[kWarpKeys / 16][4];
#pragma unroll
      for (int n = 0; n < kWarpKeys / 16; ++n) {
        ptx::ldmatrix_x4(b[n], KeyTile::chunk_pair(columns, k) + KeyTile::rows_below(n * 16));
      }
#pragma unroll
      for (int term = 0; term < C.terms; ++term) {
        u32 a[4];
        ptx::ldmatrix_x4(a, QueryTile::chunk_pair(rows, k) + static_cast<u32>(term * QueryTile::bytes));
#pragma unroll
        for (int n = 0; n < kWarpKeys / 16; ++n) {
          auto& tiles = term == 0 ? sum.tile[0] : rest.tile[0];
          ptx::mma_m16n8k16<C.q>(tiles[2 * n], a, b[n][0], b[n][1]);
          ptx::mma_m16n8k16<C.q>(tiles[2 * n + 1], a, b[n][2], b[n][3]);
        }
      }
    }
    if constexpr (C.terms > 1) {
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.tile[0][n][i] += rest.tile[0][n][i];
      }
    }
    write(sum, first_row + lane / 4, first + lane % 4 * 2);
    __syncthreads();
    if (C.stages == 1 && next >= 0) ask(next, 0);
    if (C.stages > 1) stage ^= 1;
    asked = next;
  }

  __device__ __forceinline__ void write(const Accumulator<1, kWarpKeys / 8>& sum, int row, int key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 8 * half;
      const float factor = C.terms > 1 ? factors[at] : 1.0F;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n) {
        const auto of = [&](int i) {
          float score = sum.tile[0][n][2 * half + i];
          if constexpr (C.terms > 1) {
            if (score != score) score = product_of(at, key + 8 * n + i);
          }
          return score * factor * work.p.scale;
        };
        *reinterpret_cast<float2*>(scores + at * SelectConfig::kPitch + key + 8 * n) = make_float2(of(0), of(1));
      }
    }
  }

  /// Computes a product in fp32 if tensor cores gave NaN: a term of 0 times ∞ is NaN, but the sum of the terms times ∞
  /// need not be.
  __device__ __forceinline__ float product_of(int row, int key) const {
    if (largest[row] > 0x7f800000) return __int_as_float(0x7fffffff);
    float sum = 0.0F;
#pragma unroll 1
    for (int column = 0; column < C.d; ++column) {
      const int within = column % 8 * bytes_of(C.q);
      RowVector<C.q, 1> k;
      k.load(keys + stage * KeyTile::bytes + KeyTile::at(key, column / 8) + within);
      float x = 0.0F;
#pragma unroll
      for (int term = 0; term < C.terms; ++term) {
        RowVector<C.q, 1> part;
        part.load(queries + term * QueryTile::bytes + QueryTile::at(row, column / 8) + within);
        x += part.at[0];
      }
      sum += x * k.at[0];
    }
    return sum;
  }

  /// Issues the copies of 64 keys. Keys that no row sees (they may hold anything) and columns behind the last become 0.
  __device__ __forceinline__ void ask(int first_key, int to_stage) const {
    const u32 to = ptx::shared_address(keys) + static_cast<u32>(to_stage * KeyTile::bytes);
    for (int i = thread(); i < kKeys * kChunks; i += C.threads()) {
      const int key = i / kChunks;
      const int chunk = i % kChunks;
      const bool exists = first_key + key < end && chunk * 8 < work.p.d;
      const i64 row = static_cast<i64>(work.keys.first_block) + first_key + key;
      const char* from =
          exists ? row_at<C.k>(work.p.keys, work.batch, row, work.key_head(), chunk * 8) : work.p.keys.data;
      ptx::cp_async_16_or_zeros(to + KeyTile::at(key, chunk), from, exists);
    }
    ptx::cp_async_commit();
  }
};

}  // namespace tessera::cuda
