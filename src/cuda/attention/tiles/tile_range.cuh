// SPDX-License-Identifier: Apache-2.0
// Which block computes what, and the tiles of keys that it walks.
#pragma once

#include "cuda/attention/tiles/mask.cuh"
#include "cuda/ptx/math.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// What a block computes: see TileSchedule.
struct Block {
  int first_row;  // packed
  int head;       // first query head
  int kv_head;
  int batch;
  int split;

  /// `index`: in the order of p.schedule.
  template <FwdConfig C>
  static __device__ __forceinline__ Block of(const FwdParams& p, int index) {
    const int l2_group = ptx::divide(index, p.schedule.l2_group);
    const auto in_l2_group = static_cast<int>(index - l2_group * p.schedule.l2_group.value);
    const int from_last = ptx::divide(in_l2_group, p.schedule.head_batches);
    const auto head_batch = static_cast<int>((l2_group - from_last) * p.schedule.head_batches.value + in_l2_group);
    return of_head_batch<C>(p, head_batch, p.schedule.tiles - 1 - from_last);
  }
  /// `head_batch`: of all sequences and splits; `row_tile`: of it.
  template <FwdConfig C>
  static __device__ __forceinline__ Block of_head_batch(const FwdParams& p, int head_batch, int row_tile) {
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

/// The problem of one of the blocks that share the columns of V and O: its own columns. The first writes the LSE.
template <FwdConfig C>
__device__ __forceinline__ FwdParams column_part(const FwdParams& whole) {
  const int first = static_cast<int>(blockIdx.x % C.dv_parts) * C.dv;
  FwdParams p = whole;
  p.dv = min(p.dv - first, C.dv);
  p.o = static_cast<char*>(p.o) + first * bytes_of(C.output);
  if (first != 0) {
    p.lse = nullptr;
    p.row_sums = nullptr;
  }
#pragma unroll
  for (int i = 0; i < C.segments; ++i) p.kv[i].v = static_cast<const char*>(p.kv[i].v) + first * bytes_of(C.type);
  return p;
}

/// The heads of a group are packed into the rows: row = query · group + head of the group.
struct PackedRow {
  int query;
  int head;

  __device__ __forceinline__ PackedRow(int row, const Divisor& group)
      : query(ptx::divide(row, group)), head(static_cast<int>(row - query * group.value)) {}
};

/// Addresses of a block's packed rows in a tensor (batch, row, head). The launch refuses row strides of 2^29 elements
/// and more, so that a row's stride in bytes fits 32 bits.
struct PackedRows {
  const char* first;  // query 0 of the sequence, first head of the block
  int row_stride;
  i64 head_stride;
  int first_row;
  const Divisor& group;

  __device__ __forceinline__ PackedRows(const void* tensor, int element_bytes, const Strides& strides,
                                        const Block& block, int first_token, const Divisor& heads)
      : PackedRows(
            static_cast<const char*>(tensor) +
                element_bytes * (block.batch * strides.batch + first_token * strides.row + block.head * strides.head),
            element_bytes, strides, block, heads) {}
  __device__ __forceinline__ PackedRows(const char* first_query, int element_bytes, const Strides& strides,
                                        const Block& block, const Divisor& heads)
      : first(first_query),
        row_stride(static_cast<int>(element_bytes * strides.row)),
        head_stride(element_bytes * strides.head),
        first_row(block.first_row),
        group(heads) {}

  /// Of a row of the tile.
  __device__ __forceinline__ const char* at(int row) const {
    if (group.value == 1) return ptx::advance(first, first_row + row, row_stride);
    const PackedRow packed(first_row + row, group);
    return ptx::advance(first + packed.head * head_stride, packed.query, row_stride);
  }
  __device__ __forceinline__ char* writable(int row) const { return const_cast<char*>(at(row)); }
};

/// tile_kv keys of a segment, from `first` on unless a list's tile gathers several runs.
struct KvTile {
  int segment;
  int first;
  bool cut_begin, cut_end;  // some row of the block does not see the first, the last key
  int slot = 0;             // of lists: its first cell
};

/// The tiles between the first key that any row of the block sees and the last, of both segments, from the last to the
/// first, so that the masked ones at the end come first.
template <FwdConfig C>
class TileRange {
 public:
  TileRange() = default;
  __device__ __forceinline__ TileRange(const FwdParams& p, const Sequence& sequence, const Block& block) {
    const int rows = static_cast<int>(sequence.q.length * p.group.value);
    if (block.first_row >= rows) return;
    const int first_query = PackedRow(block.first_row, p.group).query;
    const int last_query = PackedRow(min(block.first_row + C.tile_q, rows) - 1, p.group).query;
    first_ = Part(p, sequence, sequence.first, first_query, last_query);
    if constexpr (C.segments == 2) second_ = Part(p, sequence, sequence.second, first_query, last_query);
    const int total = first_.count + second_.count;
    const int share = ptx::divide(total, p.splits);
    const int longer = total - share * static_cast<int>(p.splits.value);  // splits that have one tile more
    count_ = share + (block.split < longer ? 1 : 0);
    last_ = block.split * share + min(block.split, longer) + count_ - 1;
  }

  __device__ __forceinline__ int count() const { return count_; }

  /// Key of a column of a tile.
  __device__ __forceinline__ int key(const KvTile& tile, int column) const { return tile.first + column; }
  /// Columns of a tile that are keys of a segment of `length`.
  __device__ __forceinline__ int keys(const KvTile& tile, int length) const {
    return min(length - tile.first, C.tile_kv);
  }
  /// How far that is from where it would be in a tile without gaps.
  __device__ __forceinline__ int moved(const KvTile& /*tile*/, int /*column*/) const { return 0; }
  __device__ __forceinline__ bool waives(const KvTile& /*tile*/, int /*column*/) const { return false; }

  /// In the order of the walk.
  __device__ __forceinline__ KvTile at(int i) const {
    const int index = last_ - i;
    if (C.segments == 1 || index < first_.count) return first_.at(index, 0);
    return second_.at(index - first_.count, 1);
  }

 private:
  struct Part {
    int begin = 0;  // tile
    int count = 0;
    Interval full{0, 0};  // keys that every row sees

    Part() = default;
    __device__ __forceinline__ Part(const FwdParams& p, const Sequence& sequence, const Segment& segment,
                                    int first_query, int last_query) {
      const RowBounds<C> bounds(p, sequence, segment, first_query);
      const Interval first = bounds.of(first_query);
      const Interval last = bounds.of(last_query);
      full = {last.begin, first.end};
      if (first.begin >= last.end) return;
      begin = first.begin / C.tile_kv;
      count = divide_up(last.end, C.tile_kv) - begin;
    }

    __device__ __forceinline__ KvTile at(int index, int segment) const {
      const int key = (begin + index) * C.tile_kv;
      return {segment, key, key<full.begin, key + C.tile_kv> full.end};
    }
  };

  Part first_;
  Part second_;
  int count_ = 0;
  int last_ = -1;
};

}  // namespace tessera::cuda
