// SPDX-License-Identifier: Apache-2.0
// Evaluates a user's mask once for all heads, in front of attention, where it does not depend on the head. It finds
// which tiles the mask shows, which of these it shows whole, and the bits of those that it cuts. Attention then walks a
// tile list, and loads the bits instead of asking the mask.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/ptx/grid.cuh"
#include "shared/mask_tiles.h"

namespace tessera::cuda {

/// Blocks of (kRows queries, 32 key blocks, sequences); a warp takes key blocks one after another.
template <MaskTilesConfig C, class User>
struct MarkMask {
  using Mask = typename User::Mask;
  static constexpr u32 kAll = 0xffffffffU;

  const AttentionParams& p;
  const MaskTilesParams& tiles;
  const Sequence& sequence;
  int batch;
  int first_query;
  int lane;

  static __device__ __forceinline__ void run(const AttentionParams& p, const MaskTilesParams& tiles) {
    ptx::griddepcontrol_wait_and_launch();
    if (C.classifies && tiles.resets) return reset(tiles);
    const int batch = static_cast<int>(blockIdx.z);
    const Sequence sequence(p, batch, C.segments);
    const MarkMask marks{p,
                         tiles,
                         sequence,
                         batch,
                         static_cast<int>(blockIdx.x) * MaskTilesConfig::kRows,
                         static_cast<int>(threadIdx.x) % 32};
    marks.mark(static_cast<int>(blockIdx.y));
  }

 private:
  static constexpr int warps = MaskTilesConfig::threads() / 32;

  /// What the rows of a warp see of a tile.
  struct Seen {
    bool any, all;
  };

  static __device__ __forceinline__ void reset(const MaskTilesParams& tiles) {
    const i64 at = i64{blockIdx.x} * MaskTilesConfig::threads() + threadIdx.x;
    if (at >= tiles.list_words) return;
    tiles.visible[at] = 0;
    tiles.full[at] = kAll;
  }

  __device__ __forceinline__ i64 word_of(int word) const {
    const i64 row = i64{batch} * divide_up(p.seqlen_q, kMaskBlock) + first_query / kMaskBlock;
    return row * tiles.words + word;
  }

  __device__ __forceinline__ void mark(int word) const {
    if (first_query >= sequence.q.length) {  // no row; of a query block without any, no tile
      const bool leads = first_query % kMaskBlock == 0 && threadIdx.x == 0;
      if (C.classifies && leads) tiles.full[word_of(word)] = 0;
      return;
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if constexpr (!C.classifies) {
      u32 partial = __ballot_sync(kAll, is_partial(word * 32 + lane));
      for (int i = 0; partial != 0; partial &= partial - 1, ++i) {
        if (i % warps == warp) find(word * 32 + __ffs(static_cast<int>(partial)) - 1);
      }
    } else {
      __shared__ u32 seen, hidden;
      if (threadIdx.x == 0) seen = hidden = 0;
      __syncthreads();
      for (int i = warp; i < 32 && word * 32 + i < tiles.key_blocks; i += warps) {
        const Seen found = find(word * 32 + i);
        if (lane == 0 && found.any) atomicOr(&seen, 1U << i);
        if (lane == 0 && !found.all) atomicOr(&hidden, 1U << i);
      }
      __syncthreads();
      if (threadIdx.x != 0) return;
      if (seen != 0) atomicOr(tiles.visible + word_of(word), seen);
      if (hidden != 0) atomicAnd(tiles.full + word_of(word), ~hidden);
    }
  }

  __device__ __forceinline__ int segment_of(int block) const {
    return C.segments == 2 && block >= tiles.bits.second_block ? 1 : 0;
  }
  __device__ __forceinline__ int first_key_of(int block) const {
    return (block - (segment_of(block) == 0 ? 0 : tiles.bits.second_block)) * kMaskBlock;
  }

  /// Whether the list has a block of keys as partial.
  __device__ __forceinline__ bool is_partial(int block) const {
    if (block >= tiles.key_blocks) return false;
    const int segment = segment_of(block);
    const int key = first_key_of(block);
    if (key >= sequence.segment(segment).extent.length) return false;
    const int listed = ptx::divide(key, p.list.block_kv) + (segment == 0 ? 0 : p.list.second_block);
    return ListReader(p.list, batch, 0, 0).find(ptx::divide(first_query, p.list.block_q), listed) == ListClass::partial;
  }

  __device__ __forceinline__ Seen find(int block) const {
    const int first_key = first_key_of(block);
    const Segment segment = sequence.segment(segment_of(block));
    const KeysOfQueries<C> bounds(p, sequence, segment, first_query);
    const int last_query = min(first_query + MaskTilesConfig::kRows, sequence.q.length) - 1;
    const bool reached = first_key < bounds.of(last_query).end && bounds.of(first_query).begin < first_key + kMaskBlock;
    if (!reached) return {false, false};  // its bits stay unwritten: the window hides all of these keys anyway
    HiddenBits<C> hidden;
    if (Mask::uses_position && are_positions_small(p, sequence.q_position, sequence.q.length, segment)) {
      ask<int>(hidden, segment, first_key);
    } else {
      ask<i64>(hidden, segment, first_key);
    }
    if constexpr (C.keeps_bits) {
      u32* of_row = tiles.bits.words + batch * tiles.bits.batch_stride +
                    (first_query + lane / 4) * i64{tiles.bits.row_words} + block * 4 + lane % 4;
      of_row[0] = hidden.upper;
      of_row[8 * i64{tiles.bits.row_words}] = hidden.lower;
    }
    const u32 keys = columns_below(segment.extent.length - first_key);
    const int rows = sequence.q.length - first_query - lane / 4;
    const u32 upper = rows > 0 ? keys : 0;
    const u32 lower = rows > 8 ? keys : 0;
    const bool sees = ((~hidden.upper & upper) | (~hidden.lower & lower)) != 0;
    const bool misses = ((hidden.upper & upper) | (hidden.lower & lower)) != 0;
    return {__any_sync(kAll, sees) != 0, __any_sync(kAll, misses) == 0};
  }

  /// `Position`: the integer that the mask may compute with.
  template <class Position>
  __device__ __forceinline__ void ask(HiddenBits<C>& hidden, const Segment& segment, int first_key) const {
    constexpr int at_once = sizeof(Position) == 8 ? 4 : HiddenBits<C>::columns_at_once;
    const i64 query = sequence.q_position + first_query + lane / 4;
    const i64 key = segment.position + first_key;
    hidden.template find<at_once>(lane, [&](int half, int column) -> bool {
      const ScorePoint at{p.batch_offset + batch, p.head_offset, query + half * 8, key + column};
      return !Mask::template visible<Position>(at, p.extras);
    });
  }

  /// Bits of a thread's columns that are below `count`.
  __device__ __forceinline__ u32 columns_below(int count) const {
    if (count >= kMaskBlock) return kAll;
    if (count <= 0) return 0;
    const int left = count % 8 - lane % 4 * 2;  // of its two of the last 8
    return (left <= 0 ? 0U : left == 1 ? 1U : 3U) << (count / 8 * 2) | ((1U << (count / 8 * 2)) - 1);
  }
};

}  // namespace tessera::cuda
