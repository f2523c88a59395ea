// SPDX-License-Identifier: Apache-2.0
// Which keys a block of the pass by keys has, and which rows of queries see any of them.
#pragma once

#include "cuda/attention/backward/lists/key_parts.cuh"
#include "cuda/attention/backward/lists/tile_bits.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/tiles/mask.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// `heads_a_tile`: as BwdConfig has it. Where it is more than 1, rows are packed rows: row r is query r / heads_a_tile
/// of head r % heads_a_tile of those that a tile has.
template <FwdConfig C, int heads_a_tile = 1>
struct KeyWork {
  int batch, kv_head;
  int first_head;  // query head
  int segment;
  int first_key;
  i64 q_position;  // of query 0
  Extent q;
  Segment keys;
  QueriesOfKeys<C> queries;  // from the block's first key on
  Interval uncut;            // rows that see all of the block's keys
  int first_tile;            // of rows that see any of the keys
  int tiles;

  /// Whether there are keys. `index`: of the block.
  __device__ __forceinline__ bool find(const BwdParams& params, int index) {
    const FwdParams& p = params.forward;
    const KeyBlock block(params, index);
    batch = block.batch;
    kv_head = block.kv_head;
    first_head = static_cast<int>(kv_head * p.heads_a_kv.value);
    int tile = block.tile;
    segment = C.segments == 2 && tile >= params.first_tiles ? 1 : 0;
    if (segment == 1) tile -= params.first_tiles;
    first_key = tile * C.tile_kv;
    const Sequence sequence(p, batch, C.segments);
    keys = sequence.segment(segment);
    if (first_key >= keys.extent.capacity) return false;
    q = sequence.q;
    q_position = sequence.q_position;
    queries = QueriesOfKeys<C>(p, sequence, keys, first_key);
    find_rows();
    return true;
  }

  /// Leaves some of the tiles.
  __device__ __forceinline__ void set_tiles(const Interval& to) {
    first_tile = to.begin;
    tiles = to.end - to.begin;
  }
  __device__ __forceinline__ int count(const FwdParams& p) const {
    return tiles * (static_cast<int>(p.heads_a_kv.value) / heads_a_tile);
  }
  __device__ __forceinline__ QueryTile tile(int i) const {
    const int heads = i / tiles;
    return {heads * heads_a_tile, (first_tile + i - heads * tiles) * C.tile_q};
  }
  /// The tile behind another.
  __device__ __forceinline__ QueryTile after(const QueryTile& tile) const {
    const int next = tile.first + C.tile_q;
    const bool is_last = next >= (first_tile + tiles) * C.tile_q;
    return {is_last ? tile.head + heads_a_tile : tile.head, is_last ? first_tile * C.tile_q : next};
  }
  /// The nearest tile of keys before the block's that rows see: its number, counted from 1, and the end of the tiles of
  /// rows that see it. Of the block's own tiles those up to there see it, and the others none before, as both ends of a
  /// key's interval of rows move monotonically with the key. Zeros if no row sees a key before.
  struct SeenBefore {
    int count, end_tile;
  };
  __device__ __forceinline__ SeenBefore find_seen_before() const {
    if (tiles == 0) return {0, 0};
#pragma unroll 1
    for (int key = first_key; key > 0; key -= C.tile_kv) {
      const int end = queries.of(key - 1).end;
      if (queries.of(key - C.tile_kv).begin < end) return {key / C.tile_kv, divide_up(end, C.tile_q)};
    }
    return {0, 0};
  }
  /// Rows of the sequence.
  __device__ __forceinline__ int row_count() const { return q.length * heads_a_tile; }
  /// Rows that see a key.
  __device__ __forceinline__ Interval rows_of(int key) const {
    const Interval seeing = queries.of(key);
    return {seeing.begin * heads_a_tile, seeing.end * heads_a_tile};
  }
  __device__ __forceinline__ int end_key() const { return min(first_key + C.tile_kv, keys.extent.length); }

  /// Whether some row of the tile does not see some key of the block, or is none.
  __device__ __forceinline__ bool is_cut(const QueryTile& tile) const {
    // No branch: the compiler would write the rest of a tile down twice, and run out of registers.
    return (static_cast<int>(tile.first < uncut.begin) | static_cast<int>(tile.first + C.tile_q > uncut.end)) != 0;
  }

  /// `head`: of the row's tile.
  __device__ __forceinline__ ScorePoint point_of(const FwdParams& p, int head, int row, int key) const {
    return {p.batch_offset + batch, p.head_offset + first_head + head + row % heads_a_tile,
            q_position + row / heads_a_tile, keys.position + key};
  }

 private:
  // Both ends of a key's interval of rows move monotonically with the key.
  __device__ __forceinline__ void find_rows() {
    first_tile = tiles = 0;
    uncut = {0, 0};
    const int end = end_key();
    if (first_key >= end) return;
    const Interval of_first = rows_of(first_key), of_last = rows_of(end - 1);
    if (end == first_key + C.tile_kv) uncut = {of_last.begin, of_first.end};
    const int first = of_first.begin;
    const int behind = of_last.end;
    if (first >= behind) return;
    first_tile = first / C.tile_q;
    tiles = divide_up(behind, C.tile_q) - first_tile;
  }
};

}  // namespace tessera::cuda
