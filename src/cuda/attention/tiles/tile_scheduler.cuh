// SPDX-License-Identifier: Apache-2.0
// The number of row tiles that persistent blocks take (tiles/tile_counter.cuh), and the row tile of a number. Sequences
// of one length have equal numbers of tiles, in the order of p.schedule; each packed sequence has those of its own
// length. If each had as many as the longest may have, most would have no rows, and blocks would wait for the warp that
// draws and finds them (docs/experiments/gpu-lists-and-pages.md).
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/attention/tiles/tile_schedule.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// What the scheduler requires of a configuration.
template <class Config>
concept SchedulerConfig = RowTileConfig<Config> && requires(const Config& c) { bool{c.varlen}; };

/// A whole warp calls its functions.
template <SchedulerConfig auto C>
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const AttentionParams& params) : p(params) {
    if constexpr (C.varlen) {
      int own = 0;
#pragma unroll 4
      for (int first = 0; first < p.batch; first += 32) own += of_sequence(first);
      count_ = __reduce_add_sync(0xffffffffU, own);
    }
  }

  __device__ __forceinline__ int count() const { return C.varlen ? count_ : p.schedule.count; }

  /// Returns the block of tile `number`, for packed sequences: they follow each other, each in the order of p.schedule.
  /// `number` is below count() and greater than in the call before. If there is no such tile, because lengths are
  /// written while they are read, the block's rows are behind all sequences: results are lost, but no invalid address
  /// is used, and the walk ends.
  __device__ __forceinline__ Block at(int number) {
    int own;
    int end;  // behind the tiles of this lane's sequence
    while (true) {
      own = of_sequence(first_);
      end = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, end, distance);
        if (lane() >= distance) end += other;
      }
      end += before_;
      const int last = __shfl_sync(0xffffffffU, end, 31);
      if (number < last || first_ + 32 >= p.batch) break;
      before_ = last;
      first_ += 32;
    }
    const int found = __popc(__ballot_sync(0xffffffffU, end <= number));
    if (found == 32) return {1 << 30, 0, 0, 0, 0};
    own = __shfl_sync(0xffffffffU, own, found);
    return block_of(first_ + found, own, number - (__shfl_sync(0xffffffffU, end, found) - own));
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // The head_batches of a sequence: heads and splits.
  __device__ __forceinline__ int head_batches() const {
    return static_cast<int>(p.schedule.heads.value * p.splits.value);
  }

  /// Row tiles of sequence first + lane, of all its heads and splits.
  __device__ __forceinline__ int of_sequence(int first) const {
    const int batch = min(first + lane(), p.batch - 1);  // without a branch, loads overlap
    const Extent extent = find_extent(p.cu_seqlens_q, nullptr, batch, p.seqlen_q, p.total_q);
    const int tiles = divide_up(extent.capacity * static_cast<int>(p.group.value), C.tile_q);
    return first + lane() < p.batch ? tiles * head_batches() : 0;
  }

  /// Row tile `number` of the `all` of a sequence. The heads and splits of a sequence are whole L2 groups.
  __device__ __forceinline__ Block block_of(int batch, int all, int number) const {
    const int tiles = all / head_batches();
    const int together = static_cast<int>(p.schedule.head_batches.value);
    const int l2_group = number / (tiles * together);
    const int in_l2_group = number - l2_group * tiles * together;
    const int from_last = ptx::divide(in_l2_group, p.schedule.head_batches);
    const int head_batch = (l2_group - from_last) * together + in_l2_group;  // of the sequence
    return Block::of_head_batch<C>(p, batch * head_batches() + head_batch, tiles - 1 - from_last);
  }

  const AttentionParams& p;
  int count_ = 0;
  int first_ = 0;   // first of the 32 sequences that have the last number
  int before_ = 0;  // row tiles of the sequences in front of it
};

}  // namespace tessera::cuda
