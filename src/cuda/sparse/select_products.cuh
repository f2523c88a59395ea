// SPDX-License-Identifier: Apache-2.0
// Products of scoring vectors with a tile of 64 compressed keys. They are multiplied by the scale and stored in shared
// memory. This version uses fused multiply-adds in fp32, for any types.
#pragma once

#include "cuda/sparse/select_work.cuh"

namespace tessera::cuda {

template <SelectConfig C, bool mma = C.mma()>
struct SelectProducts {
  static constexpr int kSlice = SelectConfig::kSlice;
  static constexpr int kKeys = SelectConfig::kKeys;

  const SelectWork& work;
  float* queries;  // (rows, pitch)
  float* slice;    // (keys, slice + 1): columns of the keys
  float* scores;   // (rows, SelectConfig::kPitch)
  int end = 0;     // of the keys that some row sees
  int pitch;

  __device__ __forceinline__ SelectProducts(const SelectWork& of, char* memory)
      : work(of),
        queries(reinterpret_cast<float*>(memory)),
        slice(reinterpret_cast<float*>(memory + C.query_bytes(of.p.d))),
        scores(reinterpret_cast<float*>(memory + C.query_bytes(of.p.d) + C.key_bytes())),
        pitch(round_up(of.p.d, kSlice)) {}

  /// Loads vectors [first, first + count) for multiply(); rows behind them are 0.
  __device__ __forceinline__ void load_queries(int first, int count) {
    __syncthreads();
    const int columns = pitch / C.width;
    for (int i = static_cast<int>(threadIdx.x); i < C.rows * columns; i += C.threads()) {
      const int row = i / columns;
      const int column = (i - row * columns) * C.width;
      RowVector<C.q, C.width> x;
#pragma unroll
      for (int j = 0; j < C.width; ++j) x.at[j] = 0.0F;
      if (row < count && column < work.p.d) x = load_query<C>(work, first + row, column);
#pragma unroll
      for (int j = 0; j < C.width; ++j) queries[row * pitch + column + j] = x.at[j];
    }
  }

  /// Multiplies the vectors by the 64 keys from `first_key` on. `next` is for the version with tensor cores.
  __device__ __forceinline__ void multiply(int first_key, int /*next*/) {
    constexpr int rows = C.rows / 16;
    constexpr int keys = kKeys / 16;
    const int row = static_cast<int>(threadIdx.x) / 16;
    const int key = static_cast<int>(threadIdx.x) % 16;
    float sum[rows][keys] = {};
    for (int begin = 0; begin < pitch; begin += kSlice) {
      __syncthreads();
      load_slice(first_key, begin);
      __syncthreads();
#pragma unroll 4
      for (int column = 0; column < kSlice; ++column) {
        float k[keys];
#pragma unroll
        for (int j = 0; j < keys; ++j) k[j] = slice[(key + 16 * j) * (kSlice + 1) + column];
#pragma unroll
        for (int i = 0; i < rows; ++i) {
          const float q = queries[(row + 16 * i) * pitch + begin + column];
#pragma unroll
          for (int j = 0; j < keys; ++j) sum[i][j] += q * k[j];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        scores[(row + 16 * i) * SelectConfig::kPitch + key + 16 * j] = sum[i][j] * work.p.scale;
      }
    }
    __syncthreads();
  }

  /// Loads columns of 64 keys. Keys that no row sees (they may hold anything) and columns behind the last become 0.
  __device__ __forceinline__ void load_slice(int first_key, int begin) {
    constexpr int columns = kSlice / C.width;
    for (int i = static_cast<int>(threadIdx.x); i < kKeys * columns; i += C.threads()) {
      const int key = i / columns;
      const int column = i % columns * C.width;
      RowVector<C.k, C.width> x;
#pragma unroll
      for (int j = 0; j < C.width; ++j) x.at[j] = 0.0F;
      if (first_key + key < end && begin + column < work.p.d) {
        x.load(row_at<C.k>(work.p.keys, work.batch, static_cast<i64>(work.keys.first_block) + first_key + key,
                           work.key_head(), begin + column));
      }
#pragma unroll
      for (int j = 0; j < C.width; ++j) slice[key * (kSlice + 1) + column + j] = x.at[j];
    }
  }
};

}  // namespace tessera::cuda
