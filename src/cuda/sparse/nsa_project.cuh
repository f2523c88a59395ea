// SPDX-License-Identifier: Apache-2.0
// Multiplies rows of compressed keys by their head's matrix, in fp32, because tensor cores would round the means. The
// block's 16 rows lie in shared memory, and a thread computes some columns of their products.
#pragma once

#include "cuda/ptx/grid.cuh"
#include "cuda/sparse/compressed.cuh"
#include "cuda/tile/row_vector.cuh"

namespace tessera::cuda {

template <ProjectConfig C>
struct NsaProject {
  static constexpr int kRows = ProjectConfig::kRows;

  static __device__ __forceinline__ void run(const ProjectParams& p, char* memory) {
    ptx::griddepcontrol_wait_and_launch();
    const int batch = static_cast<int>(blockIdx.z) / p.sides;
    const ProjectSide& side = p.side[static_cast<int>(blockIdx.z) - batch * p.sides];
    const CompressedSequence sequence(p.compression, batch);
    const int first = static_cast<int>(blockIdx.x) * kRows;
    const int rows = min(sequence.blocks - first, kRows);
    if (rows <= 0) return;
    const auto head = static_cast<int>(blockIdx.y);
    const int pitch = round_up(side.dim, 4);
    auto* shared = reinterpret_cast<float*>(memory);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * pitch; i += C.threads()) {
      const int row = i / pitch;
      const int column = i - row * pitch;
      RowVector<C.type, 1> one;
      one.at[0] = 0.0F;
      if (row < rows && column < side.dim) {
        one.load(row_at<C.type>(side.from, batch, sequence.first_block + first + row, head, column));
      }
      shared[i] = one.at[0];
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < side.dim; column += C.threads()) {
      float sum[kRows] = {};
      multiply(sum, side, head, column, pitch / 4, reinterpret_cast<const float4*>(memory));
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) break;
        RowVector<C.output, 1> one;
        one.at[0] = sum[row];
        one.store(row_at<C.output>(side.to, batch, sequence.first_block + first + row, head, column));
      }
    }
  }

  static __device__ __forceinline__ void multiply(float (&sum)[kRows], const ProjectSide& side, int head, int column,
                                                  int fours, const float4* rows) {
    const i64 along = C.transposed ? 1 : side.matrix_strides[1];
    const i64 across = C.transposed ? side.matrix_strides[1] : 1;
    const char* matrix = side.matrix + (head * side.matrix_strides[0] + column * across) * bytes_of(C.matrix);
    for (int four = 0; four < fours; ++four) {
      RowVector<C.matrix, 1> weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[i].at[0] = 0.0F;
        const int depth = 4 * four + i;
        if (depth < side.dim) weight[i].load(matrix + depth * along * bytes_of(C.matrix));
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float4 x = rows[row * fours + four];
        sum[row] += x.x * weight[0].at[0];
        sum[row] += x.y * weight[1].at[0];
        sum[row] += x.z * weight[2].at[0];
        sum[row] += x.w * weight[3].at[0];
      }
    }
  }
};

}  // namespace tessera::cuda
