// SPDX-License-Identifier: Apache-2.0
// Converts a tile list of any form to the bits of the passes (TileBits), which must be zeros before. Each entry sets
// the bits of both orders, rows by keys and keys by rows, so that the time depends on the number of entries. The result
// does not depend on the order in which warps set bits.
#pragma once

#include "cuda/attention/backward/lists/tile_bits.cuh"
#include "cuda/attention/tiles/list_reader.cuh"
#include "cuda/ptx/grid.cuh"

namespace tessera::cuda {

/// The grid is (blocks of kMarkedRows rows of the list, its heads, its sequences); a warp takes a row.
struct MarkTiles {
  static constexpr int threads = kMarkedRows * 32;

  const BwdParams& params;
  const ListParams& list;
  int batch, head;

  static __device__ __forceinline__ void run(const BwdParams& params) {
    ptx::griddepcontrol_wait_and_launch();
    const int row = static_cast<int>(blockIdx.x) * kMarkedRows + static_cast<int>(threadIdx.x) / 32;
    if (row >= params.list_rows) return;
    const MarkTiles marks{params, params.forward.list, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y)};
    marks.mark_row(marks.list.partial, row, false);
    if (marks.list.has_full) marks.mark_row(marks.list.full, row, true);
  }

 private:
  // `full`: whether the table has full tiles.
  __device__ __forceinline__ void mark_row(const TileTable& table, int row, bool full) const {
    const ListReader reader(list, batch, head, head);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (list.form == ListForm::bitmask) {
      for (int key = lane; key < list.key_blocks; key += 32) {
        if ((reader.bits(table, row, key / 32) >> lane & 1) != 0) mark(row, key, full);
      }
      return;
    }
    const ListRow entries = reader.row(table, row);
    const bool transposed = list.form == ListForm::transposed;
    for (int i = lane; i < entries.count; i += 32) {
      const int entry = entries.entries[i];
      mark(transposed ? entry : row, transposed ? row : entry, full);
    }
  }

  /// Returns the indices of block `block` that are below `length`; none if there is no such block.
  static __device__ __forceinline__ Interval indices_of_block(int block, const Divisor& size, int length) {
    const i64 first = i64{block} * size.value;
    if (block < 0 || first >= length) return {0, 0};
    return {static_cast<int>(first), static_cast<int>(min(first + size.value, i64{length}))};
  }
  static __device__ __forceinline__ Interval tiles_of(const Interval& rows, int size, int origin) {
    return {origin + rows.begin / size, origin + (rows.end - 1) / size + 1};
  }

  __device__ __forceinline__ void mark(int query_block, int key_block, bool full) const {
    if (key_block >= list.key_blocks) return;
    const int segment = key_block >= list.second_block ? 1 : 0;
    const FwdParams& p = params.forward;
    const Interval queries = indices_of_block(query_block, list.block_q, p.seqlen_q);
    const Interval keys =
        indices_of_block(key_block - (segment == 0 ? 0 : list.second_block), list.block_kv, p.kv[segment].capacity);
    if (queries.begin >= queries.end || keys.begin >= keys.end) return;
    for (const TileBits& bits : params.tile_bits) {
      if (bits.words == nullptr) continue;
      const Interval rows = tiles_of(queries, bits.tile_q, 0);
      const Interval columns = tiles_of(keys, bits.tile_kv, segment == 0 ? 0 : bits.first_tiles);
      const Interval own = bits.keys_own ? columns : rows;
      const Interval stream = bits.keys_own ? rows : columns;
      mark_tiles(bits, own, stream, 0);
      if (full && bits.waived_words != 0) mark_tiles(bits, own, stream, bits.waived_words);
    }
  }
  // `first_word`: the first word of a row's bits (0), or of those of its full tiles.
  __device__ __forceinline__ void mark_tiles(const TileBits& bits, const Interval& own, const Interval& stream,
                                             int first_word) const {
    u32* row = bits.words + batch * bits.batch_stride + head * bits.head_stride + own.begin * i64{bits.row_words};
    for (int i = own.begin; i < own.end; ++i, row += bits.row_words) {
      u32 added = 0;
      for (int word = stream.begin / 32; word * 32 < stream.end; ++word) {
        const u32 marked = bits_between(word * 32, stream);
        added += __popc(marked & ~atomicOr(row + first_word + word, marked));
      }
      if (bits.counts && first_word == 0 && added != 0) atomicAdd(row + bits.row_words - 1, added);
    }
  }
};

}  // namespace tessera::cuda
