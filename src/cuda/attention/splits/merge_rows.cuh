// SPDX-License-Identifier: Apache-2.0
// The last block of a row tile to end merges its splits, without another launch, by the formula of splits/combine.cuh.
// The order of splits is fixed, so that the result does not depend on which block is the last.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_counter.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/combine.h"

namespace tessera::cuda {

/// Counts a block of a row tile. Returns whether it is the last one, which resets the counter for the next run. One
/// thread calls this, after the block has stored its results.
template <RowTileConfig auto C>
__device__ __forceinline__ int count_split(const MergingFwdParams& p, const Block& block) {
  const int heads = static_cast<int>(p.schedule.heads.value);
  const int head_batch = block.batch * heads + ptx::divide(block.head, p.group);
  u64* counter = p.tile_counter.drawn + head_batch * p.schedule.tiles + block.first_row / C.tile_q;
  if (count_on(counter, p.tile_counter.tag) != static_cast<int>(p.splits.value) - 1) return 0;
  atomicExch(counter, p.tile_counter.tag << kCounterBits);
  return 1;
}

/// Reductions over 16 neighbouring lanes.
__device__ __forceinline__ float maximum_of_16(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, other));
  return x;
}
__device__ __forceinline__ int maximum_of_16(int x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x = max(x, __shfl_xor_sync(0xffffffffU, x, other));
  return x;
}
__device__ __forceinline__ float sum_of_16(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x += __shfl_xor_sync(0xffffffffU, x, other);
  return x;
}

/// Merges the parts of a row. 16 lanes have 8 columns each; each lane computes the weights of every 16th part. All
/// lanes of a warp call these functions.
template <Element output>
struct RowMerge {
  const MergingFwdParams& p;
  const float* lse_parts;
  const char* o_parts;
  int lane;  // of 16

  int used;  // parts up to the last with keys
  float highest;
  float sum;
  float inverse;

  __device__ __forceinline__ float lse_of(int part) const {
    return part < static_cast<int>(p.splits.value) ? lse_parts[part * p.lse_split] : -kInfinity;
  }
  /// Returns the weight relative to the highest LSE; −1 for a part without keys, whose output is undefined.
  __device__ __forceinline__ float weight_of(float lse) const {
    return lse == -kInfinity ? -1.0F : ptx::exp2((lse - highest) * kLog2E);
  }

  /// `sink`: null for none.
  __device__ __forceinline__ void weigh(const float* sink) {
    const int parts = static_cast<int>(p.splits.value);
    highest = -kInfinity;  // fmaxf ignores NaN, but the sum becomes NaN
    used = 0;
    for (int part = lane; part < parts; part += 16) {
      const float lse = lse_of(part);
      highest = fmaxf(highest, lse);
      if (lse != -kInfinity) used = part + 1;
    }
    highest = maximum_of_16(highest);
    used = maximum_of_16(used);
    sum = 0.0F;
    for (int part = lane; part < parts; part += 16) {
      const float lse = lse_of(part);
      if (lse != -kInfinity) sum += weight_of(lse);
    }
    sum = sum_of_16(sum);
    float share = sum;
    if (sink != nullptr && sum != 0.0F) share += ptx::exp2((*sink - highest) * kLog2E);
    inverse = sum == 0.0F ? 0.0F : ptx::reciprocal(share);
  }

  /// Returns eight columns from `column` on, which must be a column of the row.
  __device__ __forceinline__ RowVector<output, 8> merge(int column) const {
    RowVector<output, 8> merged{};
    const int most = max(used, __shfl_xor_sync(0xffffffffU, used, 16));  // of both rows of the warp
#pragma unroll 1
    for (int first = 0; first < most; first += 16) {
      const float own = weight_of(lse_of(first + lane));
      RowVector<Element::fp32, 8> part[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {  // these loads are in flight together
        const i64 number = min(first + i, max(used - 1, 0));
        part[i].load(o_parts + (number * p.o_split + column) * 4);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float weight = __shfl_sync(0xffffffffU, own, (static_cast<int>(threadIdx.x) & 16) + i);
        if (weight < 0.0F) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) merged.at[e] += weight * inverse * part[i].at[e];
      }
    }
    return merged;
  }
};

/// Merges the parts of a block's first `rows` rows, and stores outputs and LSE. `threads` threads of a block, whole
/// warps, call this.
template <Element output, int threads>
__device__ __forceinline__ void merge_rows(const MergingFwdParams& p, const Block& block, const Sequence& sequence,
                                           int rows) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto rows_of = [&](const void* tensor, int bytes, const Strides& strides) {
    return PackedRows(tensor, bytes, strides, block, sequence.q.first, p.group);
  };
  const PackedRows o_parts = rows_of(p.o, 4, p.o_strides);
  const PackedRows lse_parts = rows_of(p.lse, 4, p.lse_strides);
  const PackedRows outputs = rows_of(p.merge.o, bytes_of(output), p.merge.o_strides);
#pragma unroll 1
  for (int first = 0; first < rows; first += threads / 16) {
    const int own = first + thread / 16;
    const int row = min(own, rows - 1);  // lanes without a row repeat the last one
    RowMerge<output> merge{p, reinterpret_cast<const float*>(lse_parts.at(row)), o_parts.at(row), thread % 16};
    const int head = block.head + PackedRow(block.first_row + row, p.group).head;
    merge.weigh(p.merge.sinks != nullptr ? p.merge.sinks + head * p.merge.sinks_stride : nullptr);
#pragma unroll 1
    for (int column = merge.lane * 8; column - merge.lane * 8 < p.dv; column += 16 * 8) {
      const RowVector<output, 8> merged = merge.merge(min(column, p.dv - 8));
      if (own < rows && column < p.dv) merged.store(outputs.writable(row) + column * bytes_of(output));
    }
    if (p.merge.lse != nullptr && merge.lane == 0 && own < rows) {
      const float lse = merge.sum == 0.0F ? -kInfinity : merge.highest + ptx::log2(merge.sum) * kLn2;
      *reinterpret_cast<float*>(rows_of(p.merge.lse, 4, p.merge.lse_strides).writable(row)) = lse;
    }
  }
}

}  // namespace tessera::cuda
