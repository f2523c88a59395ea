// SPDX-License-Identifier: Apache-2.0
// The kernel that chooses the tiles of keys that have parts (KeyParts): those with more tiles of rows than a part
// should have.
#pragma once

#include "cuda/attention/backward/lists/key_parts.cuh"
#include "cuda/ptx/grid.cuh"

namespace tessera::cuda {

/// The grid is one block.
struct SplitKeys {
  static constexpr int threads = kSplitThreads;

  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    __shared__ u64 all;
    __shared__ int count;
    const KeyParts& parts = params.key_parts;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      all = 0;
      count = 0;
    }
    __syncthreads();
    u64 sum = 0;
    for (int i = thread; i < parts.tiles; i += threads) sum += static_cast<u64>(row_tiles_of(params, i));
    if (sum != 0) atomicAdd(&all, sum);
    __syncthreads();
    // A tile of keys with n tiles of rows has parts if n > length: at most n / length + 1, which is less than 2n /
    // length. So there are at most 2 · all / length parts, which is at most `most`.
    const i64 length = max(i64{kLeastPart}, (2 * static_cast<i64>(all) + parts.most - 1) / parts.most);
    for (int i = thread; i < parts.tiles; i += threads) {
      const i64 rows = row_tiles_of(params, i);
      parts.is_split[i] = rows > length;
      if (rows <= length) continue;
      const int own = static_cast<int>((rows + length - 1) / length);
      const int first = atomicAdd(&count, own);
      parts.done[first] = 0;
      for (int part = 0; part < own; ++part) parts.parts[first + part] = {i, part, own, first};
    }
    __syncthreads();
    if (thread == 0) *parts.count = count;
  }

 private:
  /// Returns how many tiles of rows, of all heads, the list selects for a tile of keys. Tiles that a mask hides
  /// entirely count too.
  static __device__ __forceinline__ i64 row_tiles_of(const BwdParams& params, int index) {
    const KeyBlock block(params, index);
    const TileBits& bits = params.tile_bits[1];
    const u32* counts = bits.words + block.batch * bits.batch_stride + (block.tile + i64{1}) * bits.row_words - 1;
    const i64 heads = params.key_parts.walks;
    if (params.forward.list.heads != ListHeads::q) return heads * counts[block.kv_head * bits.head_stride];
    i64 rows = 0;
    for (i64 head = 0; head < heads; ++head) rows += counts[(block.kv_head * heads + head) * bits.head_stride];
    return rows;
  }
};

}  // namespace tessera::cuda
