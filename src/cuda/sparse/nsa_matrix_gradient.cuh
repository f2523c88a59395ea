// SPDX-License-Identifier: Apache-2.0
// Gradients of projections: dP = Σ meanᵀ · gradient over the compressed keys of all sequences, in their order. A thread
// block computes a tile of a head's matrix, and a thread computes four rows of one column of it.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/compressed.cuh"
#include "cuda/tile/row_vector.cuh"

namespace tessera::cuda {

template <MatrixGradientConfig C>
struct NsaMatrixGradient {
  static constexpr int kTile = MatrixGradientConfig::kTile;
  static constexpr int kRows = kTile * kTile / C.threads();  // of a thread

  static __device__ __forceinline__ void run(const MatrixGradientParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    __shared__ float means[kTile][kTile];
    __shared__ float gradients[kTile][kTile];
    const MatrixGradientSide& side = p.side[blockIdx.z];
    const auto head = static_cast<int>(blockIdx.y);
    const int tiles = divide_up(side.dim, kTile);
    const int first_row = static_cast<int>(blockIdx.x) / tiles * kTile;
    const int first_column = static_cast<int>(blockIdx.x) % tiles * kTile;
    if (first_row >= side.dim) return;
    const bool packed = p.compression.cu_seqlens != nullptr;
    const int all = packed ? first_block_of(p.compression, p.compression.batch)
                           : p.compression.batch * static_cast<int>(p.blocks.value);
    const int column = static_cast<int>(threadIdx.x) % kTile;
    const int row = static_cast<int>(threadIdx.x) / kTile * kRows;
    float sum[kRows] = {};
    for (int first = 0; first < all; first += kTile) {
      for (int i = static_cast<int>(threadIdx.x); i < kTile * kTile; i += C.threads()) {
        const int block = first + i / kTile;
        const int batch = packed ? 0 : ptx::divide(min(block, all - 1), p.blocks);
        const int within = block - batch * static_cast<int>(packed ? 0 : p.blocks.value);
        const bool exists = block < all;
        means[i / kTile][i % kTile] =
            element<Element::fp32>(side.means, batch, within, head, first_row + i % kTile, exists, side.dim);
        gradients[i / kTile][i % kTile] =
            element<C.type>(side.gradients, batch, within, head, first_column + i % kTile, exists, side.dim);
      }
      __syncthreads();
#pragma unroll 8
      for (int block = 0; block < kTile; ++block) {
        const float gradient = gradients[block][column];
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum[i] += means[block][row + i] * gradient;
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_row + row + i >= side.dim || first_column + column >= side.dim) continue;
      side.matrix[head * side.matrix_strides[0] + (first_row + row + i) * side.matrix_strides[1] + first_column +
                  column] = sum[i];
    }
  }

  /// An element, or 0 if it does not exist.
  template <Element type>
  static __device__ __forceinline__ float element(const HeadRows& rows, int batch, int row, int head, int column,
                                                  bool exists, int dim) {
    RowVector<type, 1> one;
    one.at[0] = 0.0F;
    if (exists && column < dim) one.load(row_at<type>(rows, batch, row, head, column));
    return one.at[0];
  }
};

}  // namespace tessera::cuda
