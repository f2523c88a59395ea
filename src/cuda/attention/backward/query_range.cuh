// SPDX-License-Identifier: Apache-2.0
// Which keys a block of the key pass owns, and which query rows see any of them.
#pragma once

#include "cuda/attention/backward/lists/key_parts.cuh"
#include "cuda/attention/backward/lists/tile_bits.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/tiles/mask.cuh"
#include "shared/backward.h"

namespace tessera::cuda {

/// `heads_a_tile`: as in BwdConfig. If it is more than 1, rows are packed: row r is query r / heads_a_tile of the
/// tile's head r % heads_a_tile.
template <FwdConfig C, int heads_a_tile = 1>
struct KeyWork {
  int batch, kv_head;
  int first_head;  // first query head of the key head
  int segment;
  int first_key;
  i64 q_position;  // position of query 0
  Extent q;
  Segment keys;
  QueriesOfKeys<C> queries;  // gives the queries that see a key, from first_key on
  Interval uncut;            // rows that see all of the block's keys
  int first_tile;            // first tile of rows that see any of the keys
  int tiles;

  /// Finds the work of block `index`. Returns whether the block has keys.
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

  /// Restricts the block to some of its tiles of rows.
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
  /// Returns the tile that follows another in the walk.
  __device__ __forceinline__ QueryTile after(const QueryTile& tile) const {
    const int next = tile.first + C.tile_q;
    const bool is_last = next >= (first_tile + tiles) * C.tile_q;
    return {is_last ? tile.head + heads_a_tile : tile.head, is_last ? first_tile * C.tile_q : next};
  }
  /// The nearest earlier tile of keys that any row sees: its number, counted from 1, and the end of the tiles of rows
  /// that see it. Both ends of a key's interval of rows move monotonically with the key. So of the block's own tiles of
  /// rows, those before `end_tile` see that tile of keys, and the others see no earlier key. Both are 0 if no row sees
  /// an earlier key.
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

  /// Whether some row of the tile does not see all keys of the block, or lies outside of the sequence.
  __device__ __forceinline__ bool is_cut(const QueryTile& tile) const {
    // There is no branch, because the compiler would duplicate the rest of a tile's code and run out of registers.
    return (static_cast<int>(tile.first < uncut.begin) | static_cast<int>(tile.first + C.tile_q > uncut.end)) != 0;
  }

  /// `head`: QueryTile::head of the tile that has the row.
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
