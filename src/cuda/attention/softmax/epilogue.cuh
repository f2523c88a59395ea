// SPDX-License-Identifier: Apache-2.0
// The epilogue: divides O by its row sums (with the sink) and stores O and the LSE. Rows past the used length get 0 and
// −∞. For masses of tiles it also stores the sums.
#pragma once

#include "cuda/attention/scores/score.cuh"
#include "cuda/attention/softmax/residual.cuh"
#include "cuda/attention/softmax/softmax.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_schedule.cuh"
#include "cuda/tile/quad.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// What the epilogue requires of a configuration.
template <class Config>
concept EpilogueConfig = RowTileConfig<Config> && requires(const Config& c) {
  Element{c.output};
  Products{c.products};
  int{c.dv};
  int{c.rows_a_warp()};
  bool{c.dropout};
  bool{c.residual};
  bool{c.rounded_sums};
  bool{c.sums_by_product};
  int{c.output_tiles()};
};

template <EpilogueConfig auto C>
struct Epilogue {
  static constexpr int row_tiles = C.rows_a_warp() / 16;
  using Output = Accumulator<row_tiles, C.output_tiles()>;

  const FwdParams& p;
  const Block& block;
  const Sequence& sequence;
  u32 memory;  // shared memory for O of the whole block
  int thread;

  /// How many rows, from the block's first on, the sequence has memory for (rows), and uses (used_rows). Rows past the
  /// used ones see no keys.
  __device__ __forceinline__ int rows() const {
    return static_cast<int>(sequence.q.capacity * p.group.value) - block.first_row;
  }
  __device__ __forceinline__ int used_rows() const {
    return static_cast<int>(sequence.q.length * p.group.value) - block.first_row;
  }
  /// Row of the tile that this thread holds.
  __device__ __forceinline__ int row_of(int m, int half) const {
    return thread / 32 * C.rows_a_warp() + m * 16 + half * 8 + thread % 32 / 4;
  }
  __device__ __forceinline__ PackedRows rows_of(const void* tensor, int element_bytes, const Strides& strides,
                                                i64 split) const {
    const char* part = static_cast<const char*>(tensor) + element_bytes * block.split * split;
    return PackedRows(part, element_bytes, strides, block, sequence.q.first, p.group);
  }

  __device__ __forceinline__ PackedRows outputs() const {
    return rows_of(p.o, bytes_of(C.output), p.o_strides, p.o_split);
  }

  __device__ __forceinline__ PackedRows residuals() const {
    const auto& params = static_cast<const ResidualFwdParams&>(p);
    return rows_of(params.o_residual, 1, params.o_residual_strides, 0);
  }

  /// `out`: outputs(), which the caller may have computed earlier.
  template <class Online>
  __device__ __forceinline__ void store(Output& o, const Online& softmax, const PackedRows& out) const {
    float sums[row_tiles][2];
    float shares[row_tiles][2];  // what O is divided by
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[m][half] = quad_sum(softmax.sum[m][half]);
        shares[m][half] = rounded_sum(o, softmax, m, half, sums[m][half]);
      }
    }
    if ((thread / 32 + 1) * C.rows_a_warp() > used_rows()) clear_unused(o, sums);
    divide(o, sums, shares, softmax.origin);
    if (p.lse != nullptr) store_lse(sums, softmax.origin);
    if (p.row_sums != nullptr) store_sums(sums, softmax.origin);
    if constexpr (C.output == Element::fp32) {
      store_fp32(o, out);
    } else if constexpr (C.products == Products::wgmma) {
      store_from_registers(o, out);
    } else {
      store_16_bit(o, out);
    }
    if constexpr (C.residual) store_residual(o);
  }

  /// Stores the outputs of a row tile that sees no key, if no masses are wanted. A whole warp calls this.
  __device__ __forceinline__ void store_empty() const {
    constexpr int output_bytes = bytes_of(C.output);
    const int lane = thread % 32;
    const PackedRows out = outputs();
#pragma unroll 1
    for (int row = 0; row < min(rows(), C.tile_q); ++row) {
#pragma unroll 1
      for (int at = lane * 8; at < p.dv * output_bytes; at += 32 * 8) {
        *reinterpret_cast<float2*>(out.writable(row) + at) = make_float2(0.0F, 0.0F);
      }
    }
    if constexpr (C.residual) {
      const PackedRows residual = residuals();
#pragma unroll 1
      for (int row = 0; row < min(rows(), C.tile_q); ++row) {
#pragma unroll 1
        for (int at = lane * 8; at < p.dv; at += 32 * 8) {
          *reinterpret_cast<uint2*>(residual.writable(row) + at) = make_uint2(0, 0);
        }
      }
    }
    store_empty_lse();
  }
  /// Stores only the LSE of these rows. It tells the merge of splits not to read the rest.
  __device__ __forceinline__ void store_empty_lse() const {
#pragma unroll 1
    for (int row = thread % 32; p.lse != nullptr && row < min(rows(), C.tile_q); row += 32) {
      *reinterpret_cast<float*>(rows_of(p.lse, 4, p.lse_strides, p.lse_split).writable(row)) = -kInfinity;
    }
  }

 private:
  using OfRows = float[row_tiles][2];

  // Clears unused rows, which may hold NaN.
  __device__ __forceinline__ void clear_unused(Output& o, OfRows& sums) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row_of(m, half) < used_rows()) continue;
        sums[m][half] = 0.0F;
#pragma unroll
        for (int n = 0; n < C.dv / 8; ++n) o.tile[m][n][half * 2] = o.tile[m][n][half * 2 + 1] = 0.0F;
      }
    }
  }

  __device__ __forceinline__ void divide(Output& o, const OfRows& sums, OfRows& shares, const OfRows& origins) const {
    if (p.sinks != nullptr) add_sinks(shares, origins);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float inverse = sums[m][half] == 0.0F ? 0.0F : reciprocal(shares[m][half]);
        if constexpr (C.dropout) inverse *= p.dropout.scale;
#pragma unroll
        for (int n = 0; n < C.dv / 8; ++n) {
          o.tile[m][n][half * 2] *= inverse;
          o.tile[m][n][half * 2 + 1] *= inverse;
        }
      }
    }
  }

  /// What O is divided by: the sum of the rounded P where the configuration has it, otherwise `sum`.
  template <class Online>
  static __device__ __forceinline__ float rounded_sum(const Output& o, const Online& softmax, int m, int half,
                                                      float sum) {
    if constexpr (C.sums_by_product) return o.tile[m][C.dv / 8][half * 2];
    if constexpr (C.rounded_sums) return quad_sum(softmax.rounded[m][half]);
    return sum;
  }

  static __device__ __forceinline__ float reciprocal(float share) {
    const float near = ptx::reciprocal(share);
    if constexpr (!C.rounded_sums) return near;
    const float error = __fmaf_rn(-share, near, 1.0F);
    // A step of Newton's method, but not from 0 or infinity.
    return fabsf(error) < 1.0F ? __fmaf_rn(near, error, near) : near;
  }

  __device__ __forceinline__ void add_sinks(OfRows& shares, const OfRows& origins) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PackedRow at(block.first_row + row_of(m, half), p.group);
        if (shares[m][half] == 0.0F) continue;
        const float sink = p.sinks[(block.head + at.head) * p.sinks_stride];
        shares[m][half] += ptx::exp2(sink * kLog2E - origins[m][half]);
      }
    }
  }

  __device__ __forceinline__ void store_lse(const OfRows& sums, const OfRows& origins) const {
    const PackedRows lse = rows_of(p.lse, 4, p.lse_strides, p.lse_split);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        const float sum = sums[m][half];
        if (row >= rows() || thread % 4 != 0) continue;
        *reinterpret_cast<float*>(lse.writable(row)) =
            sum == 0.0F ? -kInfinity : __fmaf_rn(origins[m][half], kLn2, ptx::log2(sum) * kLn2);
      }
    }
  }

  __device__ __forceinline__ void store_sums(const OfRows& sums, const OfRows& origins) const {
    const PackedRows kept = rows_of(p.row_sums, sizeof(RowSum), p.row_sum_strides, 0);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        if (row >= rows() || thread % 4 != 0) continue;
        *reinterpret_cast<RowSum*>(kept.writable(row)) = {origins[m][half], sums[m][half]};
      }
    }
  }

  __device__ __forceinline__ void store_fp32(const Output& o, const PackedRows& out) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        if (row >= rows()) continue;
        char* to = out.writable(row) + thread % 4 * 8;
#pragma unroll
        for (int n = 0; n < C.dv / 8; ++n) {
          if (n * 8 >= p.dv) break;
          *reinterpret_cast<float2*>(to + n * 32) = make_float2(o.tile[m][n][half * 2], o.tile[m][n][half * 2 + 1]);
        }
      }
    }
  }

  // Stores from registers. The four lanes of a row exchange 16 bits for each tile, so that each has all 8 columns of
  // one tile of every four.
  __device__ __forceinline__ void store_residual(const Output& o) const {
    static_assert(bytes_of(C.output) == 2);
    const PackedRows residual = residuals();
    const int part = thread % 4;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        char* to = row < rows() ? residual.writable(row) + part * 8 : nullptr;
#pragma unroll
        for (int n = 0; n < C.dv / 8; n += 4) {
          u32 pairs[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            pairs[i] = residual_pair<C.output>(o.tile[m][n + i][half * 2], o.tile[m][n + i][half * 2 + 1]);
          }
          const uint2 columns =
              gather_quad(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410), part);
          if (to != nullptr && (n + part) * 8 < p.dv) *reinterpret_cast<uint2*>(to + n * 8) = columns;
        }
      }
    }
  }

  // Stores from registers, because shared memory already holds the next rows of Q. The four lanes of a row exchange
  // words, so that each has all 8 columns of one tile of every four.
  __device__ __forceinline__ void store_from_registers(const Output& o, const PackedRows& out) const {
    const int part = thread % 4;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        char* to = row < rows() ? out.writable(row) + part * 16 : nullptr;
#pragma unroll
        for (int n = 0; n < C.dv / 8; n += 4) {
          u32 words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = ptx::pack<C.output>(o.tile[m][n + i][half * 2], o.tile[m][n + i][half * 2 + 1]);
          }
          transpose_quad(words, part);
          if (to != nullptr && (n + part) * 8 < p.dv) ptx::store_16(to + n * 16, words);
        }
      }
    }
  }

  // Stores through shared memory, so that threads store 16 bytes each and whole rows together.
  __device__ __forceinline__ void store_16_bit(const Output& o, const PackedRows& out) const {
    using Tile = SharedTile<C.output, C.tile_q, C.dv>;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < C.dv / 8; ++n) {
          ptx::store_shared_4(memory + Tile::at(row_of(m, half), n) + thread % 4 * 4,
                              ptx::pack<C.output>(o.tile[m][n][half * 2], o.tile[m][n][half * 2 + 1]));
        }
      }
    }
    __syncwarp();  // a warp reads back its own rows only
    const int lane = thread % 32;
    constexpr int lanes_a_row = Tile::row_chunks;
#pragma unroll
    for (int step = 0; step < C.rows_a_warp() * lanes_a_row / 32; ++step) {
      const int row = thread / 32 * C.rows_a_warp() + step * (32 / lanes_a_row) + lane / lanes_a_row;
      if (row >= rows()) continue;
      char* to = out.writable(row);
#pragma unroll
      for (int panel = 0; panel < Tile::panels; ++panel) {
        const int chunk = panel * Tile::row_chunks + lane % lanes_a_row;
        if (chunk * 8 >= p.dv) continue;
        u32 value[4];
        ptx::load_shared_16(value, memory + Tile::at(row, chunk));
        ptx::store_16(to + chunk * 16, value);
      }
    }
  }
};

}  // namespace tessera::cuda
