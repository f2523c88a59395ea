// SPDX-License-Identifier: Apache-2.0
// The backward's tiles in the layouts of the dot-product kernels. Queries are rows and keys are columns, as in fp32:
//   S (rows, keys)   = Q · Kᵀ       dP (rows, keys) = dO · Vᵀ      K and V transposed once a tile of keys
//   dVᵀ (dv, keys)  += dOᵀ · P      dKᵀ (d, keys)  += Qᵀ · dS      P and dS as pairs of rows
//   dQ (rows, d)    += dS · K                                      dS as rows, K as pairs of keys
#pragma once

#include <cstdint>

#include "cpu/backward/buffers.h"
#include "cpu/tiles/dot_keys.h"
#include "cpu/tiles/sequence.h"

namespace tessera::cpu {

/// One thread's operands in bf16 for the dot-product kernels.
class BackwardDots {
 public:
  static BackwardDots place(Arena& arena, const Problem& problem, const BackwardTiling& tiling);
  [[nodiscard]] bool used() const { return rows_ > 0; }

  /// load_keys() loads rows [row, row + count) of the tile of keys. After all of them, transpose_keys() prepares the
  /// tile's `count` keys for the products.
  void load_keys(const Segment& source, const Problem& problem, std::int64_t first, std::int64_t count,
                 std::int64_t head, std::int64_t row) const;
  void transpose_keys(const Kernels& kernels, std::int64_t count);
  /// Loads rows of q and dout, unchanged; shift and delta point to the values of the first row.
  void load_queries(const Kernels& kernels, const Problem& problem, const RowView& q, const RowView& dout,
                    std::int64_t first, std::int64_t rows, std::int64_t head, const float* shift, const float* delta);

  /// Computes S and dP of the rows and the first `keys` keys; S of padding keys is −inf.
  void scores(const Kernels& kernels, std::int64_t rows, std::int64_t keys, float* s, float* dp) const;
  /// Computes P and dS, rounded, from scores that are not scaled yet. Only for BackwardUnit::scores_are_plain().
  void softmax_gradient(const Kernels& kernels, std::int64_t rows, std::int64_t keys, const float* s, const float* dp,
                        float scale) const;
  /// Rounds P and dS from fp32 into the same layouts.
  void round(const Kernels& kernels, std::int64_t rows, std::int64_t keys, float* p, float* ds) const;
  /// Adds to dV, dK and dq (rows, ld). `masked`: some weights are 0, and must hide operands that are not finite.
  void products(const Kernels& kernels, std::int64_t rows, std::int64_t keys, bool masked, float* dq,
                std::int64_t ld) const;

  /// Writes the rows of dK and dV of 16 keys from `row` on, not scaled: (kDotTile, width()) each.
  void transpose_gradients(const Kernels& kernels, std::int64_t row, float* dk, float* dv) const;
  [[nodiscard]] std::int64_t width() const { return std::max(d_, dv_); }
  float* gradient_rows = nullptr;  // (2 · kDotTile, width()): rows of dK and dV that are being stored

 private:
  std::int64_t rows_ = 0;    // of a tile, padded to kDotStep
  std::int64_t stride_ = 0;  // keys of a tile, padded to whole panels
  std::int64_t d_ = 0;       // padded to kDotStep, as is dv_
  std::int64_t dv_ = 0;
  bool keys_finite_ = true;
  bool queries_finite_ = true;
  std::uint16_t* k_ = nullptr;        // (stride, d)
  std::uint16_t* v_ = nullptr;        // (stride, dv)
  std::uint32_t* k_t_ = nullptr;      // (d / 2, stride): pairs of dims
  std::uint32_t* v_t_ = nullptr;      // (dv / 2, stride)
  std::uint32_t* k_pairs_ = nullptr;  // (stride / 2, d): pairs of keys
  std::uint16_t* q_ = nullptr;        // (rows, d)
  std::uint16_t* dout_ = nullptr;     // (rows, dv)
  std::uint32_t* pairs_ = nullptr;    // (rows / 2, width): scratch, q or dout as pairs of rows
  std::uint16_t* q_t_ = nullptr;      // (d, rows)
  std::uint16_t* dout_t_ = nullptr;   // (dv, rows)
  std::uint32_t* p_ = nullptr;        // (rows / 2, stride): pairs of rows
  std::uint32_t* ds_ = nullptr;       // (rows / 2, stride)
  std::uint16_t* ds_rows_ = nullptr;  // (rows, stride)
  float* shift_ = nullptr;            // (rows): +inf for padding
  float* delta_ = nullptr;            // (rows)
  float* dk_t_ = nullptr;             // (d, stride)
  float* dv_t_ = nullptr;             // (dv, stride)
};

}  // namespace tessera::cpu
