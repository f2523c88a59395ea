// SPDX-License-Identifier: Apache-2.0
// The tiles of keys that a tile list leaves. First the collectors, the block's threads or one warp of them, find out in
// shared memory which runs of C.run keys (cells) some of the block's queries have on their lists; then the block walks
// them, several to a kernel tile where the list's are smaller.
#pragma once

#include "cuda/attention/tiles/list_reader.cuh"
#include "cuda/attention/tiles/tile_range.cuh"
#include "shared/config.h"

namespace tessera::cuda {

/// What a cell's 16 bits say; its place is its number among all cells of both segments.
inline constexpr int kWaived = 0x8000;  // the user's mask is
inline constexpr int kNoCell = 0x7FFF;  // fills up a tile

/// Where they collect: one bit a cell, and the cells in order.
struct ListMemory {
  u32* listed;  // (cells / 32)
  u32* waived;  // (cells / 32), with C.list_waives
  unsigned short* cells;
};

/// What lists ask of a configuration, as FwdConfig names it.
template <class Config>
concept ListConfig = WalkConfig<Config> && requires(const Config& c) {
  int{c.run};
  int{c.collectors()};
  bool{c.list_waives};
  bool{c.trusts};
};

template <ListConfig auto C>
class TileList {
 public:
  static constexpr int runs = C.tile_kv / C.run;
  static constexpr int collectors = C.collectors();

  TileList() = default;

  /// By all collectors together; ends with a barrier of theirs.
  __device__ __forceinline__ TileList(const AttentionParams& p, const Sequence& sequence, const Block& block,
                                      const ListMemory& memory)
      : cells_(memory.cells), second_cell_(p.list.second_cell) {
    const int rows = static_cast<int>(sequence.q.length * p.group.value);
    if (block.first_row >= rows) return;
    const int first_query = PackedRow(block.first_row, p.group).query;
    const int last_query = PackedRow(min(block.first_row + C.tile_q, rows) - 1, p.group).query;
    first_ = Part(p, sequence, sequence.first, first_query, last_query, 0);
    if constexpr (C.segments == 2) second_ = Part(p, sequence, sequence.second, first_query, last_query, second_cell_);
    for (int word = collector(); word < p.list.cells / 32; word += collectors) {
      memory.listed[word] = 0;
      if constexpr (C.list_waives) memory.waived[word] = 0;
    }
    sync();
    const ListReader reader(p.list, block.batch, block.head, block.kv_head);
    const int first_block = ptx::divide(first_query, p.list.block_q);
    const int last_block = ptx::divide(last_query, p.list.block_q);
    mark(reader, p.list.partial, first_block, last_block, memory.listed);
    if (p.list.has_full)
      mark(reader, p.list.full, first_block, last_block, C.list_waives ? memory.waived : memory.listed);
    sync();
    const int firsts = compact(memory, first_, 0);
    const int seconds = C.segments == 2 ? compact(memory, second_, round_up(firsts, runs)) : 0;
    first_tiles_ = divide_up(firsts, runs);
    share(first_tiles_ + divide_up(seconds, runs), p, block);
    sync();
  }

  __device__ __forceinline__ int count() const { return count_; }

  /// In the order of the walk.
  __device__ __forceinline__ KvTile at(int i) const {
    const int index = first_index_ + i;
    const int segment = C.segments == 1 || index < first_tiles_ ? 0 : 1;
    const Interval full = segment == 0 ? first_.full : second_.full;
    const int first = run_key(segment, index * runs);
    const int last = runs == 1 ? first : run_key(segment, index * runs + runs - 1);
    return {segment, first, first<full.begin, last + C.run> full.end, index * runs};
  }

  /// Key of a column of a tile; beyond every sequence where nothing fills the tile up.
  __device__ __forceinline__ int key(const KvTile& tile, int column) const {
    if constexpr (runs == 1) return tile.first + column;
    return run_key(tile.segment, tile.slot + column / C.run) + column % C.run;
  }
  /// Columns of a tile that are keys of a segment of `length`: the first ones, since a tile's runs ascend.
  __device__ __forceinline__ int keys(const KvTile& tile, int length) const {
    int count = 0;
#pragma unroll 1
    for (int column = 0; column < C.tile_kv; column += C.run) {
      count += min(max(length - key(tile, column), 0), C.run);
    }
    return count;
  }
  __device__ __forceinline__ int moved(const KvTile& tile, int column) const {
    return runs == 1 ? 0 : key(tile, column) - column - tile.first;
  }
  /// Whether the list waives the user's mask there.
  __device__ __forceinline__ bool waives(const KvTile& tile, int column) const {
    return C.list_waives && (cells_[tile.slot + column / C.run] & kWaived) != 0;
  }

 private:
  struct Part {
    Interval cells{0, 0};  // that some row sees
    Interval full{0, 0};   // keys that every row sees

    Part() = default;
    __device__ __forceinline__ Part(const AttentionParams& p, const Sequence& sequence, const Segment& segment,
                                    int first_query, int last_query, int first_cell) {
      const KeysOfQueries<C> bounds(p, sequence, segment, first_query);
      const Interval first = bounds.of(first_query);
      const Interval last = bounds.of(last_query);
      full = {last.begin, first.end};
      if (first.begin < last.end) cells = {first_cell + first.begin / C.run, first_cell + divide_up(last.end, C.run)};
    }
  };

  static __device__ __forceinline__ int collector() { return static_cast<int>(threadIdx.x) % collectors; }
  static __device__ __forceinline__ void sync() {
    if constexpr (collectors == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ int run_key(int segment, int slot) const {
    constexpr int nowhere = 1 << 30;
    const int cell = cells_[slot] & kNoCell;
    return cell == kNoCell ? nowhere : (cell - (segment == 0 ? 0 : second_cell_)) * C.run;
  }

  // Sets the bits of one list's cells. Rows of several query blocks see all of their lists' cells; which row sees which
  // is then tested key by key.
  __device__ __forceinline__ void mark(const ListReader& reader, const TileTable& table, int first_block,
                                       int last_block, u32* bits) const {
    const ListParams& p = reader.p;
    if (p.form == ListForm::transposed) {
      for (int kb = collector(); kb < p.key_blocks; kb += collectors) {
        if (cells_of(p, kb).begin < cells_of(p, kb).end && reader.row(table, kb).any(first_block, last_block)) {
          mark_block(p, kb, bits);
        }
      }
      return;
    }
    for (int qb = first_block; qb <= last_block; ++qb) {
      if (p.form == ListForm::indices) {
        const ListRow row = reader.row(table, qb);
        for (int i = collector(); i < row.count; i += collectors) mark_block(p, row.entries[i], bits);
      } else {
        for (int word = collector(); word < divide_up(p.key_blocks, 32); word += collectors) {
          for (u32 left = reader.bits(table, qb, word); left != 0; left &= left - 1) {
            mark_block(p, word * 32 + __ffs(static_cast<int>(left)) - 1, bits);
          }
        }
      }
    }
  }

  // Cells that a key block has in common with what the rows see; none for a number that is no key block's.
  __device__ __forceinline__ Interval cells_of(const ListParams& p, int block) const {
    if (!C.trusts && (block < 0 || block >= p.key_blocks)) return {0, 0};
    const bool second = block >= p.second_block;
    const int local = block - (second ? p.second_block : 0);
    const int size = static_cast<int>(p.block_kv.value);
    const int origin = second ? p.second_cell : 0;
    const Interval seen = second ? second_.cells : first_.cells;
    return {max(origin + local * size / C.run, seen.begin),
            min(origin + divide_up((local + 1) * size, C.run), seen.end)};
  }

  __device__ __forceinline__ void mark_block(const ListParams& p, int block, u32* bits) const {
    const Interval cells = cells_of(p, block);
    for (int word = cells.begin / 32; word * 32 < cells.end; ++word) {
      const int low = max(cells.begin - word * 32, 0);
      const int high = min(cells.end - word * 32, 32);
      if (low < high) atomicOr(bits + word, (high == 32 ? 0U : 1U << high) - (1U << low));
    }
  }

  // Writes a part's cells in order from `slot` on, fills the last tile up, and returns how many cells there are. Every
  // warp counts all, and writes its share.
  __device__ __forceinline__ int compact(const ListMemory& memory, const Part& part, int slot) const {
    const int lane = collector() % 32;
    const int warp = collector() / 32;
    const int words = divide_up(part.cells.end, 32);
    int total = 0;
    for (int step = part.cells.begin / 32; step < words; step += 32) {
      const int word = step + lane;
      u32 waived = 0;
      u32 listed = word < words ? memory.listed[word] : 0;
      if constexpr (C.list_waives) {
        if (word < words) waived = memory.waived[word];
        listed |= waived;
      }
      int before = __popc(listed);
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffU, before, distance);
        if (lane >= distance) before += other;
      }
      const int all = __shfl_sync(0xffffffffU, before, 31);
      if ((step - part.cells.begin / 32) / 32 % (collectors / 32) == warp) {
        unsigned short* to = memory.cells + slot + total + before - __popc(listed);
        for (; listed != 0; listed &= listed - 1) {
          const int bit = __ffs(static_cast<int>(listed)) - 1;
          *to++ = static_cast<unsigned short>((word * 32 + bit) | ((waived >> bit & 1) != 0 ? kWaived : 0));
        }
      }
      total += all;
    }
    if (runs > 1 && collector() < round_up(total, runs) - total) memory.cells[slot + total + collector()] = kNoCell;
    return total;
  }

  // The tiles of the block's split.
  __device__ __forceinline__ void share(int tiles, const AttentionParams& p, const Block& block) {
    const int least = ptx::divide(tiles, p.splits);
    const int longer = tiles - least * static_cast<int>(p.splits.value);  // splits that have one tile more
    count_ = least + (block.split < longer ? 1 : 0);
    first_index_ = block.split * least + min(block.split, longer);
  }

  const unsigned short* cells_ = nullptr;
  Part first_;
  Part second_;
  int second_cell_ = 0;
  int first_tiles_ = 0;  // tiles of the first segment
  int first_index_ = 0;
  int count_ = 0;
};

template <WalkConfig auto C, bool listed = C.tiles == Tiles::list>
struct KvTilesOf {
  using type = TileRange<C>;
};
template <WalkConfig auto C>
struct KvTilesOf<C, true> {
  using type = TileList<C>;
};
/// The tiles that a configuration walks.
template <WalkConfig auto C>
using KvTiles = typename KvTilesOf<C>::type;

}  // namespace tessera::cuda
