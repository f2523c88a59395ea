// SPDX-License-Identifier: Apache-2.0
// Evaluates a user's mask that does not depend on the head, once for all heads, before attention. It finds the tiles
// with visible elements, those of them without hidden elements, and bits for the elements of the others. Attention then
// walks a tile list, and loads the bits instead of calling the mask.
#pragma once

#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/ptx/grid.cuh"
#include "shared/mask_tiles.h"

namespace tessera::cuda {

/// The grid is (kRows lines, 32 blocks of the other side, sequences); the warps of a block share the 32. Lines are
/// queries, and the blocks of the other side are of keys; with keys_down it is the reverse.
template <MaskTilesConfig C, class User>
struct MarkMask {
  using Mask = typename User::Mask;
  static constexpr u32 kAll = 0xffffffffU;
  static_assert(!C.keys_down || C.segments == 1);

  const AttentionParams& p;
  const MaskTilesParams& tiles;
  const Sequence& sequence;
  int batch;
  int first_line;
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
    if constexpr (C.keys_down) {
      marks.mark_keys(static_cast<int>(blockIdx.y) * 32);
    } else {
      marks.mark_queries(static_cast<int>(blockIdx.y));
    }
  }

 private:
  static constexpr int warps = MaskTilesConfig::threads() / 32;

  /// Whether any and whether all elements of a warp's lines in a tile are visible.
  struct Seen {
    bool any, all;
  };

  static __device__ __forceinline__ void reset(const MaskTilesParams& tiles) {
    const i64 at = i64{blockIdx.x} * MaskTilesConfig::threads() + threadIdx.x;
    if (at >= tiles.list_words) return;
    tiles.visible[at] = 0;
    tiles.full[at] = kAll;
  }

  __device__ __forceinline__ int query_blocks() const { return divide_up(p.seqlen_q, kMaskBlock); }
  __device__ __forceinline__ i64 word_of(int query_block, int word) const {
    return (i64{batch} * query_blocks() + query_block) * tiles.words + word;
  }
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / 32; }

  /// Marks the key blocks of the list's `word`.
  __device__ __forceinline__ void mark_queries(int word) const {
    const i64 at = word_of(first_line / kMaskBlock, word);
    if (first_line >= sequence.q.length) {  // no row; a query block without any has no full tile
      if (C.classifies && first_line % kMaskBlock == 0 && threadIdx.x == 0) tiles.full[at] = 0;
      return;
    }
    if constexpr (!C.classifies) {
      find_partial(word * 32);
    } else {
      __shared__ u32 seen, hidden;
      if (threadIdx.x == 0) seen = hidden = 0;
      __syncthreads();
      for (int i = warp(); i < 32 && word * 32 + i < tiles.key_blocks; i += warps) {
        const Seen found = find(word * 32 + i);
        if (lane == 0 && found.any) atomicOr(&seen, 1U << i);
        if (lane == 0 && !found.all) atomicOr(&hidden, 1U << i);
      }
      __syncthreads();
      if (threadIdx.x != 0) return;
      if (seen != 0) atomicOr(tiles.visible + at, seen);
      if (hidden != 0) atomicAnd(tiles.full + at, ~hidden);
    }
  }
  /// Marks 32 query blocks from `first` on.
  __device__ __forceinline__ void mark_keys(int first) const {
    if constexpr (!C.classifies) {
      find_partial(first);
    } else {
      const int key_block = first_line / kMaskBlock;
      const u32 bit = 1U << key_block % 32;
      for (int i = first + warp(); i < first + 32 && i < query_blocks(); i += warps) {
        const Seen found = find(i);
        const i64 at = word_of(i, key_block / 32);
        if (lane == 0 && found.any) atomicOr(tiles.visible + at, bit);
        if (lane == 0 && !found.all) atomicAnd(tiles.full + at, ~bit);
      }
    }
  }
  /// Evaluates the mask for those of 32 blocks from `first` on that are partial in the list.
  __device__ __forceinline__ void find_partial(int first) const {
    u32 partial = __ballot_sync(kAll, is_partial(first + lane));
    for (int i = 0; partial != 0; partial &= partial - 1, ++i) {
      if (i % warps == warp()) find(first + __ffs(static_cast<int>(partial)) - 1);
    }
  }

  __device__ __forceinline__ int segment_of(int block) const {
    return C.segments == 2 && block >= tiles.bits.second_block ? 1 : 0;
  }
  __device__ __forceinline__ int first_key_of(int block) const {
    return (block - (segment_of(block) == 0 ? 0 : tiles.bits.second_block)) * kMaskBlock;
  }
  /// The first query, the first key and the segment of the lines' tile with `block` of the other side.
  __device__ __forceinline__ int query_of(int block) const { return C.keys_down ? block * kMaskBlock : first_line; }
  __device__ __forceinline__ int key_of(int block) const { return C.keys_down ? first_line : first_key_of(block); }
  __device__ __forceinline__ int segment_of_tile(int block) const { return C.keys_down ? 0 : segment_of(block); }
  static constexpr int queries = C.keys_down ? kMaskBlock : MaskTilesConfig::kRows;
  static constexpr int keys = C.keys_down ? MaskTilesConfig::kRows : kMaskBlock;

  __device__ __forceinline__ bool is_partial(int block) const {
    if (block >= (C.keys_down ? query_blocks() : tiles.key_blocks)) return false;
    const int segment = segment_of_tile(block);
    const int query = query_of(block);
    const int key = key_of(block);
    if (query >= sequence.q.length || key >= sequence.segment(segment).extent.length) return false;
    const int listed = ptx::divide(key, p.list.block_kv) + (segment == 0 ? 0 : p.list.second_block);
    return ListReader(p.list, batch, 0, 0).find(ptx::divide(query, p.list.block_q), listed) == ListClass::partial;
  }

  __device__ __forceinline__ Seen find(int block) const {
    const int first_query = query_of(block);
    const int first_key = key_of(block);
    const Segment segment = sequence.segment(segment_of_tile(block));
    const int queries_left = sequence.q.length - first_query;
    const int keys_left = segment.extent.length - first_key;
    if (queries_left <= 0) return {false, false};
    const KeysOfQueries<C> bounds(p, sequence, segment, first_query);
    const int last_query = first_query + min(queries, queries_left) - 1;
    const bool reached = first_key < bounds.of(last_query).end && bounds.of(first_query).begin < first_key + keys;
    // If the window hides all elements, their bits are not written. Lines behind the last key do not keep a tile from
    // being full, unless its key block has no keys.
    if (!reached) return {false, keys_left <= 0 && first_key % kMaskBlock != 0};
    HiddenBits<C> hidden;
    if (Mask::uses_position && are_positions_small(p, sequence.q_position, sequence.q.length, segment)) {
      ask<int>(hidden, segment, first_query, first_key);
    } else {
      ask<i64>(hidden, segment, first_query, first_key);
    }
    if constexpr (C.keeps_bits) {
      u32* of_line = tiles.bits.words + batch * tiles.bits.batch_stride +
                     (first_line + lane / 4) * i64{tiles.bits.row_words} + block * 4 + lane % 4;
      of_line[0] = hidden.upper;
      of_line[8 * i64{tiles.bits.row_words}] = hidden.lower;
    }
    const u32 across = columns_below(C.keys_down ? queries_left : keys_left);
    const int lines = (C.keys_down ? keys_left : queries_left) - lane / 4;
    const u32 upper = lines > 0 ? across : 0;
    const u32 lower = lines > 8 ? across : 0;
    const bool sees = ((~hidden.upper & upper) | (~hidden.lower & lower)) != 0;
    const bool misses = ((hidden.upper & upper) | (hidden.lower & lower)) != 0;
    return {__any_sync(kAll, sees) != 0, __any_sync(kAll, misses) == 0};
  }

  /// `Position`: the integer type in which the mask may compute.
  template <class Position>
  __device__ __forceinline__ void ask(HiddenBits<C>& hidden, const Segment& segment, int first_query,
                                      int first_key) const {
    constexpr int at_once = sizeof(Position) == 8 ? 4 : HiddenBits<C>::columns_at_once;
    const i64 query = sequence.q_position + first_query + (C.keys_down ? 0 : lane / 4);
    const i64 key = segment.position + first_key + (C.keys_down ? lane / 4 : 0);
    hidden.template find<at_once>(lane, [&](int half, int column) -> bool {
      const int line = half * 8;
      const ScorePoint at{p.batch_offset + batch, p.head_offset, query + (C.keys_down ? column : line),
                          key + (C.keys_down ? line : column)};
      return !Mask::template visible<Position>(at, p.extras);
    });
  }

  /// The bits of a thread's columns below `count`.
  __device__ __forceinline__ u32 columns_below(int count) const {
    if (count >= kMaskBlock) return kAll;
    if (count <= 0) return 0;
    const int left = count % 8 - lane % 4 * 2;  // of its two columns of the last 8
    return (left <= 0 ? 0U : left == 1 ? 1U : 3U) << (count / 8 * 2) | ((1U << (count / 8 * 2)) - 1);
  }
};

}  // namespace tessera::cuda
