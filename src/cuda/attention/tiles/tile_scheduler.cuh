// SPDX-License-Identifier: Apache-2.0
// How many row tiles there are, for blocks that take one after another (tiles/tile_counter.cuh), and which one a number
// is. Sequences of one length have equally many, in the order of p.schedule; each packed sequence has those of its own
// length. Were there as many of each as of the longest, most would be nobody's, and blocks would wait for the warp that
// draws and finds them (docs/experiments/gpu-lists-and-pages.md).
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/attention/tiles/tile_schedule.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// What the scheduler asks of a configuration.
template <class Config>
concept SchedulerConfig = RowTileConfig<Config> && requires(const Config& c) { bool{c.varlen}; };

/// By a warp.
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

  /// For packed sequences, which come one after the other, each in the order of p.schedule. `number`: below count();
  /// later ones are larger. Behind all rows where there is none any more: who writes lengths while they are read loses
  /// results, but no address follows from it, and the walk ends.
  __device__ __forceinline__ Block at(int number) {
    int own;
    int end;  // of this lane's sequence
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

  // Heads and splits.
  __device__ __forceinline__ int head_batches() const {
    return static_cast<int>(p.schedule.heads.value * p.splits.value);
  }

  /// Row tiles of sequence first + lane.
  __device__ __forceinline__ int of_sequence(int first) const {
    const int batch = min(first + lane(), p.batch - 1);  // loads in no branch may be under way together
    const Extent extent = find_extent(p.cu_seqlens_q, nullptr, batch, p.seqlen_q, p.total_q);
    const int tiles = divide_up(extent.capacity * static_cast<int>(p.group.value), C.tile_q);
    return first + lane() < p.batch ? tiles * head_batches() : 0;
  }

  /// Row tile `number` of the `all` of a sequence, whose heads and splits are whole L2 groups.
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
  int first_ = 0;   // of 32 sequences: where the last number was found
  int before_ = 0;  // row tiles of the sequences in front of it
};

}  // namespace tessera::cuda
