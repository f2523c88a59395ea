// SPDX-License-Identifier: Apache-2.0
// The work of a thread block: some tiles of queries of one list of one sequence, the compressed keys that each row
// sees, and the forced blocks, which are selected whatever their scores are.
#pragma once

#include "cuda/sparse/compressed.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/nsa_select.h"

namespace tessera::cuda {

struct SelectWork {
  const SelectParams& p;
  int batch, list;
  int first_tile;  // of this thread block; the last tiles see most keys and go first
  int position;    // of row 0
  Extent queries;
  CompressedSequence keys;

  __device__ __forceinline__ explicit SelectWork(const SelectParams& params)
      : p(params),
        batch(static_cast<int>(blockIdx.z)),
        list(static_cast<int>(blockIdx.y)),
        first_tile(static_cast<int>(gridDim.x - 1 - blockIdx.x) * params.tiles_together),
        position(find_position(params, static_cast<int>(blockIdx.z))),
        queries(find_extent(params.cu_seqlens_q, nullptr, batch, params.seqlen_q, params.total_q)),
        keys(params.compression, batch) {}

  /// Rounds the offset down to a multiple of the tile's rows, and limits it so that sums with it fit into 32 bits.
  static __device__ __forceinline__ int find_position(const SelectParams& p, int batch) {
    if (p.q_offset == nullptr) return 0;
    const auto offset = static_cast<int>(min(max(p.q_offset[batch], i64{0}), i64{1} << 29));
    return ptx::divide(offset, p.tile) * static_cast<int>(p.tile.value);
  }

  __device__ __forceinline__ int key_head() const { return ptx::divide(list, p.lists_a_kv); }
  __device__ __forceinline__ int rows_of_tile() const { return static_cast<int>(p.tile.value); }
  /// The query of row 0 of a tile of the thread block.
  __device__ __forceinline__ int begin_of(int tile) const { return (first_tile + tile) * rows_of_tile(); }
  __device__ __forceinline__ bool has_rows(int tile) const {
    return tile < p.tiles_together && first_tile + tile < p.tiles && begin_of(tile) < queries.length;
  }
  __device__ __forceinline__ int position_of(int tile, int row, ScoringRows scoring) const {
    return position + begin_of(tile) + (scoring == ScoringRows::mean ? rows_of_tile() - 1 : row);
  }
  /// Scoring rows of a tile that are in the sequence.
  __device__ __forceinline__ int rows_of(int tile) const {
    return min(static_cast<int>(p.tile_rows.value), queries.length - begin_of(tile));
  }

  /// Compressed keys that a row at `position` would see under the causal mask if the sequence had no end.
  __device__ __forceinline__ int begun_at(int position) const {
    return position + 1 < p.needed ? 0 : ptx::divide(position + 1 - p.needed, p.compression.stride) + 1;
  }
  /// Compressed keys that a row at `position` sees.
  __device__ __forceinline__ int visible_at(int position) const {
    return p.causal ? min(keys.blocks, begun_at(position)) : keys.blocks;
  }
  /// Compressed keys that scoring row `row` of the thread block (of all its tiles) sees; 0 if there is no such row.
  __device__ __forceinline__ int visible_to(int row, ScoringRows scoring) const {
    const int tile = ptx::divide(row, p.tile_rows);
    const int of_tile = row - tile * static_cast<int>(p.tile_rows.value);
    if (!has_rows(tile) || of_tile >= rows_of(tile)) return 0;
    return visible_at(position_of(tile, of_tile, scoring));
  }
  /// The most compressed keys that a row of a tile sees.
  __device__ __forceinline__ int most_visible(int tile, ScoringRows scoring) const {
    return has_rows(tile) ? visible_at(position_of(tile, rows_of(tile) - 1, scoring)) : 0;
  }
  /// The end of the selection blocks that share a token with one of the `visible` compressed blocks. Compressed blocks
  /// are complete, so that the indices of their tokens fit into 32 bits.
  __device__ __forceinline__ int candidates(int visible) const {
    if (visible == 0) return 0;
    const int last = (visible - 1) * static_cast<int>(p.compression.stride.value) + p.compression.length - 1;
    return ptx::divide(last, p.block) + 1;
  }
  /// Compressed keys [first_key, end_key) share tokens with selection blocks [begin, begin + count).
  __device__ __forceinline__ int first_key(int begin) const {
    const int token = begin * static_cast<int>(p.block.value);
    return token < p.compression.length ? 0 : ptx::divide(token - p.compression.length, p.compression.stride) + 1;
  }
  __device__ __forceinline__ int end_key(int begin, int count) const {
    return ptx::divide((begin + count) * static_cast<int>(p.block.value) - 1, p.compression.stride) + 1;
  }
};

/// The blocks that exist for a tile, which are those below `begun`, and the forced ones among them.
struct ForcedBlocks {
  int initial;                 // blocks below this are forced
  int local_begin, local_end;  // blocks in this interval are forced; those from `begun` on do not exist
  int begun;
  int places;  // entries of the list for blocks that are not forced

  ForcedBlocks() = default;
  __device__ __forceinline__ ForcedBlocks(const SelectWork& work, int tile) {
    const SelectParams& p = work.p;
    const int first = work.position + work.begin_of(tile);
    const int last_block = ptx::divide(first + work.rows_of_tile() - 1, p.block);
    initial = p.initial;
    local_begin = p.local == 0 ? 0 : max(initial, ptx::divide(first, p.block) - p.local + 1);
    local_end = p.local == 0 ? 0 : max(local_begin, last_block + 1);
    const int tokens = work.keys.tokens.length;
    const int all = tokens == 0 ? 0 : ptx::divide(tokens - 1, p.block) + 1;
    begun = p.causal ? min(all, last_block + 1) : all;
    places = p.selected.top - initial - (local_end - local_begin);
  }
  /// The same for blocks of compressed keys. With a causal mask the newest blocks are forced, beginning with the block
  /// of the last key that the tile's first row sees.
  static __device__ __forceinline__ ForcedBlocks of_keys(const SelectWork& work, int tile) {
    const SelectParams& p = work.p;
    const int first = work.position + work.begin_of(tile);
    const int last = p.causal ? work.begun_at(first + work.rows_of_tile() - 1) : 0;
    ForcedBlocks forced{};
    if (last > 0) {
      forced.local_begin = ptx::divide(max(work.begun_at(first) - 1, 0), p.compressed_block);
      forced.local_end = ptx::divide(last - 1, p.compressed_block) + 1;
    }
    forced.begun = work.keys.blocks == 0 ? 0 : ptx::divide(work.keys.blocks - 1, p.compressed_block) + 1;
    forced.places = p.compressed.top - (forced.local_end - forced.local_begin);
    return forced;
  }
  __device__ __forceinline__ bool has(int block) const {
    return block < initial || (block >= local_begin && block < local_end);
  }
  __device__ __forceinline__ int initial_count() const { return min(initial, begun); }
  __device__ __forceinline__ int local_count() const { return max(0, min(local_end, begun) - local_begin); }
};

/// Loads elements of a scoring vector: of one head of a scoring row, or of the sum over all heads that share the list.
template <SelectConfig C>
__device__ __forceinline__ RowVector<C.q, C.width> load_query(const SelectWork& work, int vector, int column) {
  const SelectParams& p = work.p;
  const bool sums_heads = C.score == BlockScore::dot;
  const auto shared = static_cast<int>(p.shared_heads.value);
  const int row = sums_heads ? vector : ptx::divide(vector, p.shared_heads);
  const int tile = ptx::divide(row, p.tile_rows);
  const int of_tile = row - tile * static_cast<int>(p.tile_rows.value);
  RowVector<C.q, C.width> sum;
#pragma unroll
  for (int i = 0; i < C.width; ++i) sum.at[i] = 0.0F;
  if (!work.has_rows(tile) || of_tile >= work.rows_of(tile)) return sum;
  const int begin = work.begin_of(tile) + of_tile;
  const int rows = C.scoring == ScoringRows::mean ? min(work.rows_of_tile(), work.queries.length - begin) : 1;
  const int first_head = work.list * shared + (sums_heads ? 0 : vector - row * shared);
  const int heads = sums_heads ? shared : 1;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
    for (int head = first_head; head < first_head + heads; ++head) {
      RowVector<C.q, C.width> one;
      one.load(row_at<C.q>(p.q, work.batch, static_cast<i64>(work.queries.first) + begin + i, head, column));
#pragma unroll
      for (int j = 0; j < C.width; ++j) sum.at[j] += one.at[j];
    }
  }
  if constexpr (C.scoring == ScoringRows::mean) {
#pragma unroll
    for (int i = 0; i < C.width; ++i) sum.at[i] /= static_cast<float>(rows);
  }
  return sum;
}

/// The state of a tile in shared memory.
struct alignas(16) SelectTile {
  float bar;  // scores up to this do not change the list; NaN: all scores may
  int end;    // of the candidates
  ForcedBlocks forced;
};
static_assert(sizeof(SelectTile) == SelectConfig::kStateBytes);

/// The state of its list of blocks of compressed keys.
struct alignas(16) SelectKeyTile {
  float bar;
  int end;     // of the keys that score
  float best;  // score so far of the incomplete block; exact if it is above the bar
  int next;    // the first key that has not been taken
  ForcedBlocks forced;
};
static_assert(sizeof(SelectKeyTile) == SelectConfig::kKeyStateBytes);

}  // namespace tessera::cuda
