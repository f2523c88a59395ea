// SPDX-License-Identifier: Apache-2.0
// Maps a block of a key pass to its tile of keys, or to its part of one (KeyParts), and adds up the sums of parts.
#pragma once

#include "cuda/ptx/math.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// The tile of keys of block `index` of the key pass. L2 groups of heads follow each other. In a group the tiles of
/// keys are in order, each for all heads: under a causal mask most rows see the first keys, so long blocks begin first.
struct KeyBlock {
  int batch, kv_head;
  int tile;  // numbered over both segments

  __device__ __forceinline__ KeyBlock(const BwdParams& params, int index) {
    const int l2_group = ptx::divide(index, params.key_l2_blocks);
    const auto in_l2_group = static_cast<int>(index - l2_group * params.key_l2_blocks.value);
    tile = ptx::divide(in_l2_group, params.key_l2_heads);
    const auto head = static_cast<int>((l2_group - tile) * params.key_l2_heads.value + in_l2_group);
    batch = ptx::divide(head, params.kv_heads);
    kv_head = static_cast<int>(head - batch * params.kv_heads.value);
  }
};

/// Finds the part of grid block `block`; a tile that is not split counts as one part. Returns false for blocks without
/// work: those of parts that do not exist, and those of tiles that other blocks take as parts.
__device__ __forceinline__ bool find_part(const KeyParts& parts, int block, KeyPart& part) {
  if (block < parts.most) {
    if (block >= *parts.count) return false;
    part = parts.parts[block];
    return true;
  }
  part = {block - parts.most, 0, 1, 0};
  return parts.most == 0 || !parts.is_split[part.block];
}

/// Writes a part's sums to memory: `count` of each thread, which lie in shared memory from `at` on, `threads` apart.
/// For the last block of a tile to do so, the sums of all its parts replace them, and the function returns true. The
/// whole block calls this.
template <int threads, int count>
__device__ __forceinline__ bool add_parts(const KeyParts& parts, const KeyPart& part, int thread, u32 at) {
  float* own = parts.sums + (part.first + part.part) * i64{count * threads} + thread;
#pragma unroll 8
  for (int i = 0; i < count; ++i) own[i * threads] = ptx::load_shared_4(at + i * threads * 4);
  __threadfence();
  __syncthreads();
  const bool is_last = thread == 0 && atomicAdd(parts.done + part.first, 1) == part.parts - 1;
  if (__syncthreads_or(is_last ? 1 : 0) == 0) return false;
  __threadfence();
#pragma unroll 1
  for (int number = 0; number < part.parts; ++number) {
    const float* from = parts.sums + (part.first + number) * i64{count * threads} + thread;
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const u32 sum = at + i * threads * 4;
      const float before = number == 0 ? 0.0F : ptx::load_shared_4(sum);
      ptx::store_shared_4(sum, __float_as_uint(before + __ldcg(from + i * threads)));
    }
  }
  return true;
}

/// The same for sums in registers: visit(use) calls use(sum, i) for each of the `count` of a thread, sync() is a
/// barrier of the threads, and `is_last` is in shared memory.
template <int threads, int count, class Visit, class Sync>
__device__ __forceinline__ bool add_parts(const RowParts& parts, const KeyPart& part, int thread, bool& is_last,
                                          Visit visit, Sync sync) {
  if (part.parts == 1) return true;
  float* first = parts.sums + part.first * i64{count * threads} + thread;
  float* own = first + part.part * i64{count * threads};
  visit([&](float& sum, int i) { own[i * threads] = sum; });
  __threadfence();
  sync();
  if (thread == 0) is_last = atomicAdd(parts.done + part.block, 1) == part.parts - 1;
  sync();
  if (!is_last) return false;
  __threadfence();
  visit([](float& sum, int /*i*/) { sum = 0.0F; });
#pragma unroll 1
  for (int number = 0; number < part.parts; ++number) {
    const float* from = first + number * i64{count * threads};
    visit([&](float& sum, int i) { sum += __ldcg(from + i * threads); });
  }
  return true;
}

}  // namespace tessera::cuda
