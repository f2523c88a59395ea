// SPDX-License-Identifier: Apache-2.0
// Computes the masses of tiles from the sums of their row tiles, and the list of those above the threshold. One warp
// takes a query block of one head.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/math.cuh"
#include "shared/mass.h"

namespace tessera::cuda {

/// The grid is (query blocks, query heads, sequences); a thread block is one warp.
__device__ __forceinline__ void finish_mass(const AttentionParams& p, const MassParams& mass) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto query_block = static_cast<int>(blockIdx.x);
  const auto head = static_cast<int>(blockIdx.y);
  const auto batch = static_cast<int>(blockIdx.z);
  const Extent q = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
  const int rows = clamp(q.length - query_block * mass.block_q, 0, mass.block_q);
  const auto offset = [&](const BlockStrides& strides) {
    return batch * strides.batch + head * strides.head + query_block * strides.block;
  };
  const auto row_tiles = static_cast<int>(mass.row_tiles.value);
  const i64 block = (static_cast<i64>(batch) * mass.heads + head) * mass.query_blocks + query_block;
  const float* sums = mass.sums + block * row_tiles * mass.key_blocks;
  int count = 0;
  for (int first = 0; first < mass.key_blocks; first += 32) {
    const int key_block = first + lane;
    const bool exists = key_block < mass.key_blocks;
    float sum = 0.0F;
    for (int tile = 0; exists && tile < row_tiles; ++tile) {
      sum += sums[static_cast<i64>(tile) * mass.key_blocks + key_block];
    }
    const float mean = rows > 0 ? sum / static_cast<float>(rows) : 0.0F;
    const float weight = mass.square ? sqrtf(mean) : mean;
    if (exists && mass.mass != nullptr) mass.mass[offset(mass.mass_strides) + key_block] = weight;
    const bool kept = exists && weight > mass.threshold;
    const u32 bits = __ballot_sync(0xffffffffU, kept);
    if (mass.next_bits != nullptr && lane == 0) mass.next_bits[offset(mass.bits_strides) + first / 32] = bits;
    if (mass.next_indices != nullptr && kept) {
      mass.next_indices[offset(mass.indices_strides) + count + __popc(bits & ((1U << lane) - 1))] = key_block;
    }
    count += __popc(bits);
  }
  if (mass.next_counts == nullptr) return;  // without key blocks, next_indices has no address
  for (int entry = count + lane; entry < mass.key_blocks; entry += 32) {
    mass.next_indices[offset(mass.indices_strides) + entry] = -1;
  }
  if (lane == 0) mass.next_counts[offset(mass.counts_strides)] = count;
}

}  // namespace tessera::cuda
