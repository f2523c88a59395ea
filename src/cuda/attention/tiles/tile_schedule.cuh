// SPDX-License-Identifier: Apache-2.0
// The row tile of each block, in the order that TileSchedule (shared/params.h) describes.
#pragma once

#include "cuda/ptx/math.cuh"
#include "shared/params.h"

namespace tessera::cuda {

/// What the schedule requires of a configuration: packed rows of a tile.
template <class Config>
concept RowTileConfig = requires(const Config& c) { int{c.tile_q}; };

/// What a block computes: see TileSchedule.
struct Block {
  int first_row;  // packed
  int head;       // first query head
  int kv_head;
  int batch;
  int split;

  /// `index`: in the order of p.schedule.
  template <RowTileConfig auto C>
  static __device__ __forceinline__ Block of(const AttentionParams& p, int index) {
    const int l2_group = ptx::divide(index, p.schedule.l2_group);
    const auto in_l2_group = static_cast<int>(index - l2_group * p.schedule.l2_group.value);
    const int from_last = ptx::divide(in_l2_group, p.schedule.head_batches);
    const auto head_batch = static_cast<int>((l2_group - from_last) * p.schedule.head_batches.value + in_l2_group);
    return of_head_batch<C>(p, head_batch, p.schedule.tiles - 1 - from_last);
  }
  /// `head_batch`: its index among those of all sequences and splits; `row_tile`: the index among its row tiles.
  template <RowTileConfig auto C>
  static __device__ __forceinline__ Block of_head_batch(const AttentionParams& p, int head_batch, int row_tile) {
    const int sequence = ptx::divide(head_batch, p.schedule.heads);  // and split
    Block block;
    block.first_row = row_tile * C.tile_q;
    block.head = static_cast<int>((head_batch - sequence * p.schedule.heads.value) * p.group.value);
    block.kv_head = ptx::divide(block.head, p.heads_a_kv);
    block.batch = ptx::divide(sequence, p.splits);
    block.split = static_cast<int>(sequence - block.batch * p.splits.value);
    return block;
  }
};

}  // namespace tessera::cuda
