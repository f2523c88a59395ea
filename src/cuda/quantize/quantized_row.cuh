// SPDX-License-Identifier: Apache-2.0
// A row in the registers of a group of lanes of a warp. A lane has chunks `step · lanes + lane` of `width` elements.
#pragma once

#include "cuda/quantize/quotients.cuh"
#include "cuda/tile/eight_bits.cuh"
#include "cuda/tile/philox.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/quantize.h"

namespace tessera::cuda {

/// Random signs of a lane's columns, and the scale of the rotation.
template <QuantizeConfig C>
struct RowSigns {
  u32 bits[C.steps];
  float scale;

  __device__ __forceinline__ RowSigns(const QuantizeParams& p, int lane) {
    if constexpr (C.hadamard) {
      const u64 seed = p.seed_at != nullptr ? *p.seed_at : p.seed;
      scale = p.rotation_scale;
#pragma unroll
      for (int step = 0; step < C.steps; ++step) {
        const u32 column = static_cast<u32>((step * C.lanes + lane) * C.width);
        const Philox draws(column / 128, 0, 0, 0, static_cast<u32>(seed), static_cast<u32>(seed >> 32U));
        const u32 low = (column & 32U) != 0 ? draws.word[1] : draws.word[0];
        const u32 high = (column & 32U) != 0 ? draws.word[3] : draws.word[2];
        bits[step] = ((column & 64U) != 0 ? high : low) >> (column % 32);
      }
    }
  }
  __device__ __forceinline__ float apply(int step, int i, float x) const {
    return (bits[step] >> static_cast<u32>(i) & 1U) != 0 ? x * -scale : x * scale;
  }
};

template <QuantizeConfig C>
struct QuantizedRow {
  float at[C.steps][C.width];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) at[step][i] = 0.0F;
    }
  }

  static __device__ __forceinline__ int column(int step, int lane) { return (step * C.lanes + lane) * C.width; }

  /// Loads a row; columns from `columns` on are 0.
  __device__ __forceinline__ void load(const char* from, int lane, int columns) {
    clear();
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
      if (column(step, lane) >= columns) continue;
      RowVector<C.from, C.width> chunk;
      chunk.load(from + column(step, lane) * bytes_of(C.from));
#pragma unroll
      for (int i = 0; i < C.width; ++i) at[step][i] = chunk.at[i];
    }
  }

  /// Multiplies by the random signs, and then each block of `chunks` chunks, a power of two, by a Hadamard matrix. All
  /// lanes of the warp call this.
  __device__ __forceinline__ void rotate(const RowSigns<C>& signs, int chunks, int lane) {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) at[step][i] = signs.apply(step, i, at[step][i]);
#pragma unroll
      for (int half = 1; half < C.width; half *= 2) {
#pragma unroll
        for (int i = 0; i < C.width; ++i) {
          if ((i & half) == 0) cross(at[step][i], at[step][i | half]);
        }
      }
    }
#pragma unroll
    for (int half = 1; half < C.lanes; half *= 2) {
      if (half < chunks) cross_lanes(half, (lane & half) != 0);
    }
#pragma unroll
    for (int half = 1; half < C.steps; half *= 2) {
      if (half * C.lanes < chunks) cross_steps(half);
    }
  }

  __device__ __forceinline__ void subtract(const float* mean, int lane, int columns) {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
      if (column(step, lane) >= columns) continue;
#pragma unroll
      for (int i = 0; i < C.width; ++i) at[step][i] -= mean[column(step, lane) + i];
    }
  }

  __device__ __forceinline__ void add_finite(const QuantizedRow& row) {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) at[step][i] += fabsf(row.at[step][i]) < kInfinity ? row.at[step][i] : 0.0F;
    }
  }

  /// The largest of the finite magnitudes.
  __device__ __forceinline__ float largest() const {
    const float largest = largest_of([](float magnitude) { return magnitude; });  // fmaxf ignores NaN
    if (largest < kInfinity) return largest;
    return largest_of([](float magnitude) { return magnitude < kInfinity ? magnitude : 0.0F; });
  }

  /// Stores the row divided by `descale`. Returns how many elements are out of range if the configuration counts them.
  template <Element to>
  __device__ __forceinline__ int store(char* row, int lane, int columns, float descale) const {
    const Quotients quotients(descale);
    if (quotients.is_ordinary) {
      return store<to>(row, lane, columns, [&](float x) { return quotients.of(x); });
    }
    return store<to>(row, lane, columns, [&](float x) { return x / descale; });
  }

 private:
  /// `scale` divides a number by the descale.
  template <Element to, class Scale>
  __device__ __forceinline__ int store(char* row, int lane, int columns, Scale scale) const {
    int out_of_range = 0;
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
      if (column(step, lane) >= columns) continue;
      float scaled[C.width];
#pragma unroll
      for (int i = 0; i < C.width; ++i) {
        scaled[i] = scale(at[step][i]);
        if constexpr (C.counts) out_of_range += EightBits<to>::is_out_of_range(scaled[i]) ? 1 : 0;
      }
      if constexpr (C.width == 8) {
        u32 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[i] = EightBits<to>::pack(scaled[4 * i], scaled[4 * i + 1]) |
                     EightBits<to>::pack(scaled[4 * i + 2], scaled[4 * i + 3]) << 16U;
        }
        *reinterpret_cast<uint2*>(row + column(step, lane)) = make_uint2(words[0], words[1]);
      } else {
        row[column(step, lane)] = static_cast<char>(EightBits<to>::byte(scaled[0]));
      }
    }
    return out_of_range;
  }

  template <class Magnitude>
  __device__ __forceinline__ float largest_of(Magnitude magnitude) const {
    float largest = 0.0F;
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) largest = fmaxf(largest, magnitude(fabsf(at[step][i])));
    }
    return largest;
  }
  static __device__ __forceinline__ void cross(float& a, float& b) {
    const float before = a;
    a = before + b;
    b = before - b;
  }
  __device__ __forceinline__ void cross_lanes(int half, bool is_upper) {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) {
        const float other = __shfl_xor_sync(0xffffffffU, at[step][i], half);
        at[step][i] = is_upper ? other - at[step][i] : at[step][i] + other;
      }
    }
  }
  __device__ __forceinline__ void cross_steps(int half) {
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
      if ((step & half) != 0 || (step | half) >= C.steps) continue;
#pragma unroll
      for (int i = 0; i < C.width; ++i) cross(at[step][i], at[step | half][i]);
    }
  }
};

}  // namespace tessera::cuda
