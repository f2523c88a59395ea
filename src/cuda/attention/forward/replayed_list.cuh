// SPDX-License-Identifier: Apache-2.0
// Adds values that are not finite at the end (softmax/non_finite.cuh). By then the ring of a list holds only the last
// tiles, so each warp collects the list's granules once more.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/softmax/non_finite.cuh"

namespace tessera::cuda {

/// The work of a block, for a warp that walks the list once more by itself, with its own ring.
template <FwdConfig C>
struct ReplayedWork {
  using Collector = ListCollector<C, 32, FwdConfig::kReplayedGranules>;

  const Block& block;
  const Sequence& sequence;
  const DropoutDraws& dropout;
  typename Collector::List tiles;
  const AttentionParams& p;
  u32* window;
  ListPosition collected;

  /// `memory`: list_replay_bytes() of it.
  __device__ __forceinline__ ReplayedWork(const AttentionParams& params, const SharedWork<C>& work, u32* memory)
      : block(work.block),
        sequence(work.sequence),
        dropout(work.dropout),
        tiles(work.tiles, memory + C.list_window_bytes() / 4),
        p(params),
        window(memory),
        collected(Collector{p, block, tiles, memory}.start()) {}

  /// Makes tile i readable; tiles before it need not stay.
  __device__ __forceinline__ void collect(int i) {
    const int begin = tiles.ranks().begin + i * tiles.granules;
    if (collected.rank >= begin + tiles.granules) return;
    Collector{p, block, tiles, window}.fill(collected, begin + FwdConfig::kReplayedGranules);
  }
  __device__ __forceinline__ bool may_hide(const KvTile& tile) const { return hides<C>(tile); }
  __device__ __forceinline__ int keys_of(const KvTile& tile) const {
    return tiles.keys(tile, sequence.segment(tile.segment).extent.length);
  }
};

/// Each warp that computes calls this for its own rows. `warp_row`: the first of them within the block. `memory`: with
/// a list, list_replay_bytes() of shared memory.
template <FwdConfig C, class Mask, class Work>
__device__ __forceinline__ void add_replaced_values(const FwdParams& p, Work& work, const Epilogue<C>& epilogue,
                                                    int warp_row, int lane, u32* memory) {
  if constexpr (C.tiles == Tiles::list) {
    ReplayedWork<C> again(p, work, memory);
    ReplacedValues<C, Mask, ReplayedWork<C>>{p, again, epilogue, warp_row, lane}.add_to_outputs();
  } else {
    ReplacedValues<C, Mask, Work>{p, work, epilogue, warp_row, lane}.add_to_outputs();
  }
}

}  // namespace tessera::cuda
