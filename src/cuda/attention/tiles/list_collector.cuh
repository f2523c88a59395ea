// SPDX-License-Identifier: Apache-2.0
// Finds the granules of keys that a tile list has for a row tile, and writes them to the ring of a TileList
// (tiles/tile_list.cuh). They are collected in windows of kListWindow granules: entries of all query blocks that the
// rows touch set bits, one for each granule, and then the granules of the window are taken in order. A window begins at
// the next entry. So the work depends on the number of entries, not on that of keys, and the memory on neither.
//
// A row tile's granules are counted first, because splits share the tiles and walks must know their end. Meanwhile the
// first granules are written to the ring, and mostly all of them fit. If not, the granules are collected a second time,
// piece by piece, while the block walks them.
#pragma once

#include "cuda/attention/tiles/list_reader.cuh"
#include "cuda/attention/tiles/tile_list.cuh"

namespace tessera::cuda {

/// Granules of a window; a lane takes those of one word.
inline constexpr int kListWindow = FwdConfig::kListWindow;
static_assert(kListWindow == 32 * 32);

/// How far a list is collected: the next rank, and the first granule of its segment that may have this rank.
struct ListPosition {
  int rank;
  int granule;
};

/// `collectors` threads, a block or one warp of it, call every function together. The state lies in shared memory,
/// because the warp that finds work has few registers.
template <ListConfig auto C, int collectors, int entries = C.list_granules()>
struct ListCollector {
  using List = TileList<C, entries>;
  static constexpr int granules = List::granules;

  const AttentionParams& p;
  const Block& block;
  List& list;
  u32* bits;  // of the current window, (kListWindow / 32), with C.list_waives twice

  /// Counts the tiles of the block; there are none if it has no row in the sequence. Returns how far `ring` is filled:
  /// to the end, or if it does not have room for all granules, not at all. Ends with a barrier.
  __device__ __forceinline__ ListPosition count(const Sequence& sequence, u32* ring) const {
    const bool writes = collector() == 0;
    const int rows = static_cast<int>(sequence.q.length * p.group.value);
    if (writes) begin(sequence, rows, ring);
    sync();
    ListPosition at{0, 0};
    if (block.first_row >= rows) return at;
#pragma unroll 1
    for (int segment = 0; segment < C.segments; ++segment) {
      at.granule = list.seen(segment).begin;
#pragma unroll 1
      while (at.granule < list.seen(segment).end) take(segment, at, 1 << 30, {0, entries});
      fill_up(at, round_up(at.rank, granules), {0, entries});
      if (segment == 0 && writes) list.first_tiles_ = at.rank / granules;
    }
    if (writes) share(at.rank / granules);
    sync();
    return at.rank <= entries ? at : start();
  }

  /// The position before all ranks.
  __device__ __forceinline__ ListPosition start() const {
    return {0, list.seen(C.segments == 1 || list.first_tiles_ > 0 ? 0 : 1).begin};
  }

  /// Continues until rank `end` or the end of the block's own ranks, and writes the block's own ranks to the ring. Even
  /// if the list in memory has changed since it was counted, every rank is written, with keys of its own segment. Ends
  /// with a barrier.
  __device__ __forceinline__ void fill(ListPosition& at, int end) const {
    end = min(end, list.ranks().end);
#pragma unroll 1
    while (at.rank < end) {
      const int border = list.first_tiles_ * granules;
      const int segment = C.segments == 1 || at.rank < border ? 0 : 1;
      const int until = segment == 0 ? min(end, border) : end;
      const Interval kept{list.ranks().begin, end};
      if (at.granule < list.seen(segment).end) {
        take(segment, at, until, kept);
      } else {
        fill_up(at, until, kept);
      }
      if (C.segments == 2 && segment == 0 && at.rank == border) at.granule = list.seen(1).begin;
    }
    sync();
  }
  /// Collects ranks [begin, end), beginning again at the front of the list, for walks from the last tile to the first.
  /// In these, granules are tiles. Ends with a barrier.
  __device__ __forceinline__ void fill_between(int begin, int end) const {
    static_assert(granules == 1);
    ListPosition at = start();
#pragma unroll 1
    while (at.rank < end) {
      const int segment = C.segments == 1 || at.rank < list.first_tiles_ ? 0 : 1;
      const int until = segment == 0 ? min(end, list.first_tiles_) : end;
      if (at.granule < list.seen(segment).end) {
        take(segment, at, until, {begin, end});
      } else {
        fill_up(at, until, {begin, end});
      }
      if (C.segments == 2 && segment == 0 && at.rank == list.first_tiles_) at.granule = list.seen(1).begin;
    }
    sync();
  }

 private:
  static constexpr u32 kAll = 0xffffffffU;
  static constexpr int kNone = 1 << 30;  // no block

  static __device__ __forceinline__ int collector() { return static_cast<int>(threadIdx.x) % collectors; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ void sync() {
    if constexpr (collectors == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ void begin(const Sequence& sequence, int rows, u32* ring) const {
    list.ring_ = ring;
    list.count_ = list.first_tile_ = 0;
    if (block.first_row >= rows) return;
    const int first_query = PackedRow(block.first_row, p.group).query;
    const int last_query = PackedRow(min(block.first_row + C.tile_q, rows) - 1, p.group).query;
    if constexpr (skip_of(C) == Skip::threshold) list.descends = (*skip().step & 1) != 0;
    list.query_blocks_ = {ptx::divide(first_query, p.list.block_q), ptx::divide(last_query, p.list.block_q) + 1};
    list.first_ = part_of(sequence, sequence.first, first_query, last_query);
    if constexpr (C.segments == 2) list.second_ = part_of(sequence, sequence.second, first_query, last_query);
  }
  __device__ __forceinline__ ListPart part_of(const Sequence& sequence, const Segment& segment, int first_query,
                                              int last_query) const {
    const KeysOfQueries<C> bounds(p, sequence, segment, first_query);
    const Interval first = bounds.of(first_query);
    const Interval last = bounds.of(last_query);
    if (first.begin >= last.end) return {{0, 0}, {last.begin, first.end}};
    return {{first.begin / C.granule, divide_up(last.end, C.granule)}, {last.begin, first.end}};
  }
  // The tiles of the block's split.
  __device__ __forceinline__ void share(int tiles) const {
    const int least = ptx::divide(tiles, p.splits);
    const int longer = tiles - least * static_cast<int>(p.splits.value);  // splits that have one tile more
    list.count_ = least + (block.split < longer ? 1 : 0);
    list.first_tile_ = block.split * least + min(block.split, longer);
  }

  __device__ __forceinline__ ListReader reader() const {
    return ListReader(p.list, block.batch, block.head, block.kv_head);
  }
  __device__ __forceinline__ const SkipParams& skip() const {
    return static_cast<const SkipFwdParams&>(static_cast<const FwdParams&>(p)).skip;
  }
  __device__ __forceinline__ int block_of(int segment, int key) const {
    return ptx::divide(key, p.list.block_kv) + (segment == 0 ? 0 : p.list.second_block);
  }
  // The granules of a key block in a window; none if the number is not that of a key block.
  __device__ __forceinline__ Interval granules_of_block(int key_block, int segment, const Interval& window) const {
    const int local = key_block - (segment == 0 ? 0 : p.list.second_block);
    if constexpr (!C.trusts || C.segments == 2) {
      const int blocks = segment == 0 ? p.list.second_block : p.list.second_blocks;
      if (local < 0 || local >= blocks) return {0, 0};
    }
    const int size = static_cast<int>(p.list.block_kv.value);
    return {max(local * size / C.granule, window.begin), min(divide_up((local + 1) * size, C.granule), window.end)};
  }

  // Takes the granules of the next window, at most until rank `end`, and writes those whose ranks are in `kept` to the
  // ring. Ends with a barrier.
  __device__ __forceinline__ void take(int segment, ListPosition& at, int end, const Interval& kept) const {
    const Interval window = find_window(segment, at.granule);
    constexpr int words = kListWindow / 32;
    u32* full_bits = C.list_waives ? bits + words : bits;
    if (collectors == 32 || collector() < 32) full_bits[lane()] = bits[lane()] = 0;
    sync();
    mark(p.list.partial, segment, window, bits);
    if (p.list.has_full) mark(p.list.full, segment, window, full_bits);
    sync();
    u32 waived = 0;
    u32 listed = bits[lane()];
    if constexpr (C.list_waives) {
      waived = full_bits[lane()];
      listed |= waived;
    }
    int last = __popc(listed);  // granules to the end of the lane's word
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, last, distance);
      if (lane() >= distance) last += other;
    }
    const int first = at.rank + last - __popc(listed);
    keep(window.begin + lane() * 32, listed, waived, first, kept);
    const int all = __shfl_sync(kAll, last, 31);
    if (all <= end - at.rank) {
      at = {at.rank + all, window.end};
    } else {  // the next piece begins at the first granule that is left
      const u32 behind = __ballot_sync(kAll, at.rank + last > end);
      for (int i = first; i < end && listed != 0; ++i) listed &= listed - 1;
      const int next = window.begin + lane() * 32 + __ffs(static_cast<int>(listed)) - 1;
      at = {end, __shfl_sync(kAll, next, __ffs(static_cast<int>(behind)) - 1)};
    }
    sync();
  }

  // Every warp writes its share of each word's granules. `rank`: that of the word's first granule.
  __device__ __forceinline__ void keep(int first_granule, u32 listed, u32 waived, int rank,
                                       const Interval& kept) const {
    if constexpr (collectors == 32) return keep_words(first_granule - lane() * 32, listed, waived, rank, kept);
    constexpr int bits = 32 * 32 / collectors;
    u32 own = listed;
    if constexpr (bits < 32) {
      const int low = collector() / 32 * bits;
      own = listed >> low & ((u32{1} << (bits % 32)) - 1);
      rank += __popc(listed & ((u32{1} << low) - 1));
      first_granule += low;
      waived >>= low;
    }
    for (; own != 0; own &= own - 1, ++rank) {
      const int bit = __ffs(static_cast<int>(own)) - 1;
      if (rank < kept.begin || rank >= kept.end) continue;
      const u32 key = static_cast<u32>(first_granule + bit) * C.granule;
      list.ring_[rank & (entries - 1)] = C.list_waives && (waived >> bit & 1) != 0 ? key | kWaived : key;
    }
  }
  // For one warp, which takes word after word: lists with many granules have them in few words.
  __device__ __forceinline__ void keep_words(int first_granule, u32 listed, u32 waived, int rank,
                                             const Interval& kept) const {
    for (u32 left = __ballot_sync(kAll, listed != 0); left != 0; left &= left - 1) {
      const int word = __ffs(static_cast<int>(left)) - 1;
      const u32 granules_of_word = __shfl_sync(kAll, listed, word);
      const int own = __shfl_sync(kAll, rank, word) + __popc(granules_of_word & ((u32{1} << lane()) - 1));
      u32 key = static_cast<u32>(first_granule + word * 32 + lane()) * C.granule;
      if constexpr (C.list_waives) key |= (__shfl_sync(kAll, waived, word) >> lane() & 1) != 0 ? kWaived : 0;
      const bool is_listed = (granules_of_word >> lane() & 1) != 0;
      if (is_listed && own >= kept.begin && own < kept.end) list.ring_[own & (entries - 1)] = key;
    }
  }
  __device__ __forceinline__ void fill_up(ListPosition& at, int end, const Interval& kept) const {
    for (int rank = max(at.rank, kept.begin) + collector(); rank < min(end, kept.end); rank += collectors) {
      list.ring_[rank & (entries - 1)] = kNowhere;
    }
    at.rank = end;
  }

  // Finds the next window from granule `from` on. If more than one window is left, it begins at the next entry.
  __device__ __forceinline__ Interval find_window(int segment, int from) const {
    const Interval seen = list.seen(segment);
    if (seen.end - from > kListWindow) {
      const int next = next_block(block_of(segment, from * C.granule)) - (segment == 0 ? 0 : p.list.second_block);
      const int blocks = segment == 0 ? p.list.second_block : p.list.second_blocks;
      const int size = static_cast<int>(p.list.block_kv.value);
      from = next >= blocks ? seen.end : min(max(from, next * size / C.granule), seen.end);
    }
    return {from, min(seen.end - from, kListWindow) + from};
  }

  // The first key block from `from` on that any of the query blocks lists. For transposed lists, which do not show it,
  // this is `from`.
  __device__ __forceinline__ int next_block(int from) const {
    if (p.list.form == ListForm::transposed) return from;
    if (p.list.form == ListForm::bitmask) return next_bit(from);
    int nearest = next_entry(p.list.partial, from);
    if (p.list.has_full) nearest = min(nearest, next_entry(p.list.full, from));
    return max(__reduce_min_sync(kAll, nearest), from);  // entries that are not sorted must not lead back
  }
  __device__ __forceinline__ int next_entry(const TileTable& table, int from) const {
    int nearest = kNone;
#pragma unroll 1
    for (int qb = list.query_blocks_.begin + lane(); qb < list.query_blocks_.end; qb += 32) {
      const ListRow row = reader().row(table, qb);
      const int at = row.lower_bound(from);
      if (at < row.count) nearest = min(nearest, row.entries[at]);
    }
    return nearest;
  }
  __device__ __forceinline__ int next_bit(int from) const {
#pragma unroll 1
    for (int first = from / 32; first < p.list.words; first += 32) {
      u32 listed = 0;
      const int word = first + lane();
#pragma unroll 1
      for (int qb = list.query_blocks_.begin; qb < list.query_blocks_.end && word < p.list.words; ++qb) {
        listed |= reader().bits(p.list.partial, qb, word);
        if (p.list.has_full) listed |= reader().bits(p.list.full, qb, word);
        if constexpr (skip_of(C) != Skip::none) listed = with_musts(skip(), listed, word);
      }
      if (word == from / 32) listed &= kAll << from % 32;
      const u32 found = __ballot_sync(kAll, listed != 0);
      if (found == 0) continue;
      const int at = word * 32 + __ffs(static_cast<int>(listed)) - 1;
      return __shfl_sync(kAll, at, __ffs(static_cast<int>(found)) - 1);
    }
    return kNone;
  }

  // Sets the bits of one list's granules in a window. If rows belong to several query blocks, the granules of all their
  // lists are taken, and whether a row sees a key is then tested element by element.
  __device__ __forceinline__ void mark(const TileTable& table, int segment, const Interval& window, u32* to) const {
    if (window.begin >= window.end) return;
    const int first = block_of(segment, window.begin * C.granule);
    const int last = min(block_of(segment, window.end * C.granule - 1), p.list.key_blocks - 1);
    if (p.list.form == ListForm::transposed) {
      for (int kb = first + collector(); kb <= last; kb += collectors) {
        const ListRow row = reader().row(table, kb);
        if (row.any(list.query_blocks_.begin, list.query_blocks_.end - 1)) mark_block(kb, segment, window, to);
      }
      return;
    }
    if (p.list.form == ListForm::bitmask && p.list.block_kv.value == C.granule) {
      return mark_words(table, first, last, to);
    }
    for (int qb = list.query_blocks_.begin; qb < list.query_blocks_.end; ++qb) {
      if (p.list.form == ListForm::indices) {
        const ListRow row = reader().row(table, qb);
        int i = row.count > 64 ? row.lower_bound(first) : 0;  // a short list is read from its start
        for (i += collector(); i < row.count; i += collectors) {
          const int listed = row.entries[i];
          if (row.count > 64 && listed > last) break;
          mark_block(listed, segment, window, to);
        }
      } else {
        for (int word = first / 32 + collector(); word <= last / 32; word += collectors) {
          u32 left = reader().bits(table, qb, word);
          if constexpr (skip_of(C) != Skip::none) left = with_musts(skip(), left, word);
          for (; left != 0; left &= left - 1) {
            mark_block(word * 32 + __ffs(static_cast<int>(left)) - 1, segment, window, to);
          }
        }
      }
    }
  }
  // The same for key blocks `first` to `last` of a bitmask whose blocks are granules: the window's words are those of
  // the list, shifted to begin at `first`.
  __device__ __forceinline__ void mark_words(const TileTable& table, int first, int last, u32* to) const {
    const int own = first + collector() * 32;
    if (own > last || (collectors > 32 && collector() >= 32)) return;
    u32 marked = 0;
    for (int qb = list.query_blocks_.begin; qb < list.query_blocks_.end; ++qb) {
      u32 low = reader().bits(table, qb, own / 32);
      u32 high = own / 32 < last / 32 ? reader().bits(table, qb, own / 32 + 1) : 0;
      if constexpr (skip_of(C) != Skip::none) {
        low = with_musts(skip(), low, own / 32);
        if (own / 32 < last / 32) high = with_musts(skip(), high, own / 32 + 1);
      }
      marked |= __funnelshift_r(low, high, own % 32);
    }
    if (last - own < 31) marked &= (u32{2} << (last - own)) - 1;
    to[collector()] |= marked;
  }
  __device__ __forceinline__ void mark_block(int key_block, int segment, const Interval& window, u32* to) const {
    const Interval listed = granules_of_block(key_block, segment, window);
    const int begin = listed.begin - window.begin;
    const int end = listed.end - window.begin;
    for (int word = begin / 32; word * 32 < end; ++word) {
      const int low = max(begin - word * 32, 0);
      const int high = min(end - word * 32, 32);
      if (low < high) atomicOr(to + word, (high == 32 ? 0U : 1U << high) - (1U << low));
    }
  }
};

}  // namespace tessera::cuda
