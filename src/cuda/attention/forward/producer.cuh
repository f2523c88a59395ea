// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup of the forward by wgmma: one warp finds row tiles, one issues the TMA copies of K and V, and
// two (checkers) search V for values that are not finite or transpose it; with descales_keys one loads descales.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/softmax/non_finite.cuh"
#include "cuda/attention/sparse/skip_step.cuh"
#include "cuda/attention/tiles/tile_boxes.cuh"
#include "cuda/attention/tiles/tile_counter.cuh"
#include "cuda/attention/tiles/tile_list.cuh"
#include "cuda/attention/tiles/tile_scheduler.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_wgmma.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/transposed_bytes.cuh"

namespace tessera::cuda {

template <FwdConfig C>
struct Producer {
  static constexpr int groups = C.warps / 4;  // consumer warpgroups
  static constexpr bool groups_differ = kGroupsDiffer<C>;
  // kDrawnAhead: how many tiles of keys are still to be copied when the next row tile is drawn. Drawing and finding it
  // takes about 4000 clocks, more if a list is read. A tile takes a clock for every 2048 multiply-adds, and the
  // consumers are some tiles behind the copies.
  static constexpr int kDrawingClocks = C.tiles == Tiles::list ? 9000 : 5000;
  static constexpr int kDrawnAhead = divide_up(kDrawingClocks * 2048, C.tile_q* C.tile_kv*(C.d + C.dv));
  using QTile = SharedTile<C.q_type(), 64, C.d>;  // one group's rows
  using KTile = SharedTile<C.k_type(), C.tile_kv, C.d, C.whole_rows>;
  using VTile = SharedTile<C.v_type(), C.tile_kv, C.dv, C.whole_rows>;
  using VtTile = SharedTile<C.type, C.dv, C.transposed_keys()>;
  using Works = SharedWorks<C>;
  using Work = WorkOfRings<C>;

  static_assert(sizeof(Works) <= FwdConfig::kWorkBytes);

  const FwdParams& p;
  const TensorMaps* maps;
  const DescaleParams& descales;
  char* memory;
  Works& shared;
  const u32 q_base;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;

  __device__ __forceinline__ u32 k_at(int use) const {
    return q_base + C.q_bytes() + static_cast<u32>(use) % C.stages * C.stage_bytes();
  }
  __device__ __forceinline__ u32 v_at(int use) const { return k_at(use) + C.k_bytes(); }
  __device__ __forceinline__ u32 vt_at(int use) const { return v_at(use) + C.v_bytes(); }
  __device__ __forceinline__ Ring<C.stages> keys() const { return {ptx::shared_address(shared.keys)}; }
  __device__ __forceinline__ Ring<C.stages> values() const { return {ptx::shared_address(shared.values)}; }
  __device__ __forceinline__ Ring<C.stages> checks() const { return {ptx::shared_address(shared.checks)}; }
  __device__ __forceinline__ u32 nearly_copied() const { return ptx::shared_address(&shared.nearly_copied); }
  __device__ __forceinline__ u32 granules_there() const { return ptx::shared_address(&shared.granules_there); }
  __device__ __forceinline__ u32 granules_read() const { return ptx::shared_address(&shared.granules_read); }
  __device__ __forceinline__ Int8Scores<C> int8_scores() const { return {q_base + C.q_bytes() + C.ring_bytes()}; }
  __device__ __forceinline__ Ring<2> items() const { return {ptx::shared_address(shared.items)}; }

  /// One thread calls this before a barrier of the block.
  __device__ __forceinline__ void init() const {
    shared.end = -1;
    items().init(1, C.warps + 3);
    keys().init(C.descales_keys ? 2 : 1, C.warps);
    values().init(1, C.multiplies_bytes() ? kCheckers : C.warps + kCheckers);
    checks().init(kCheckers, C.multiplies_bytes() ? C.warps : 1);
    ptx::mbarrier_init(nearly_copied(), 1);
    if constexpr (C.tiles == Tiles::list) {
      ptx::mbarrier_init(granules_there(), 1);
      ptx::mbarrier_init(granules_read(), 1);
    }
#pragma unroll
    for (u64& barrier : shared.queries) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    ptx::fence_mbarrier_init();
  }

  /// `warp`: number of the warp in the warpgroup.
  __device__ __forceinline__ void produce(int warp) const {
    if (warp == 0) {
      find_work();
      return;
    }
    ptx::griddepcontrol_wait_and_launch();
    if (C.descales_keys && warp == 3) {
      load_descales();
    } else if (warp >= 2) {
      check();
    } else if (lane < kCopiers<C>) {
      copy();
    }
  }

 private:
  // Finds and publishes row tiles. One is drawn when the one before it nears its end: if drawn earlier, it could wait
  // behind a long one while other blocks are idle. The first is found before the preceding kernels end, if possible.
  __device__ __forceinline__ void find_work() const {
    if (C.has_descales() || !p.finds_early) ptx::griddepcontrol_wait_and_launch();
    TileScheduler<C> row_tiles(p);
    auto tile = static_cast<int>(blockIdx.x);
    int item = 0;
    int use = 0;
    ListPosition collected{0, 0};
    int halves = 0;  // halves of lists' rings that were refilled
    int moved = 0;   // row tiles whose row of the skip state has moved on
#pragma unroll 1
    while (tile < row_tiles.count()) {
      items().wait_empty(item);
      if constexpr (C.skip != Skip::none) {
        if (moved + 2 <= item) move_list(moved++);  // its work is where the next row tile's will be
      }
      if (find(row_tiles, tile, item, use, collected)) {
        if constexpr (C.tiles == Tiles::list) {
          publish_list(item, collected, halves);
        } else {
          publish(item);
        }
        ++item;
      }
      if (p.tile_counter.drawn == nullptr) break;
      if (item <= 1) ptx::griddepcontrol_wait_and_launch();  // before the first draw
      if (lane == 0) {
        if (item > 0) ptx::mbarrier_wait(nearly_copied(), static_cast<u32>(item & 1) ^ 1);
        tile = static_cast<int>(gridDim.x) + next_tile(p.tile_counter);
      }
      tile = ptx::uniform(tile);
    }
    items().wait_empty(item);
    if (lane == 0) shared.end = item;
    publish(item);
    if constexpr (C.skip != Skip::none) {
      while (moved < item) move_list(moved++);
    }
    // The preceding kernels have ended. This block has waited for them before its first draw; or, if it has no row
    // tile, at the beginning: only packed sequences leave a block none, and they exclude finds_early.
    if (lane == 0 && p.tile_counter.left != nullptr) finish_counting(p.tile_counter);
  }
  // Moves the list's row of a row tile on to the next step, once all warps have released the row tile.
  __device__ __forceinline__ void move_list(int item) const {
    move_list_by_partials<C>(p, shared.works[item % 2], partials<C>(p, item), lane,
                             [&] { items().wait_empty(item + 2); });
  }

  __device__ __forceinline__ void publish(int item) const {
    __syncwarp();
    if (lane == 0) items().publish(item);
  }
  /// Finds a row tile's work; a whole warp calls this. Returns whether any row sees a key; if not, stores the outputs.
  /// `use`: its first use of the rings, on return the end of its uses. `collected`: how far a list is collected.
  __device__ __forceinline__ bool find(TileScheduler<C>& row_tiles, int tile, int item, int& use,
                                       ListPosition& collected) const {
    Work& work = shared.works[item % 2];
    bool found = false;
    Block packed{};
    if constexpr (C.varlen) packed = row_tiles.at(tile);  // the whole warp calls this
    if (lane == 0) {
      found = work.find(p, C.varlen ? packed : Block::of<C>(p, tile));
      work.non_finite = 0;
      if constexpr (C.skip != Skip::none) work.unknown = 0;
      if constexpr (C.descales_at_once()) find_descales<C>(p, descales, work);
      if constexpr (C.finds_small_positions()) find_small_positions(work);
      if constexpr (C.dropout) work.dropout = DropoutDraws(p.dropout, work.block.batch, work.block.head);
    }
    if (!ptx::uniform(found)) return false;
    if constexpr (C.tiles == Tiles::list) {
      __syncwarp();
      collected = collector_of(item).count(work.sequence, list_ring<C>(memory, item % 2));
    }
    __syncwarp();
    if (work.tiles.count() == 0) {
      ptx::griddepcontrol_wait_and_launch();
      Epilogue<C>{p, work.block, work.sequence, q_base, thread}.store_empty();
      if constexpr (C.skip != Skip::none) move_unseen_list<C>(p, work, lane);
      __syncwarp();
      return false;
    }
    const int end = use + work.tiles.count();
    if (lane == 0) {
      work.outputs = Epilogue<C>{p, work.block, work.sequence, q_base, thread}.outputs().first;
      work.item = item;
      work.first_use = use;
      work.drawing_use = max(use, end - kDrawnAhead);
      work.end_use = end;
    }
    if constexpr (groups_differ) {
      __syncwarp();
      if (lane < groups) work.own[lane] = uses_of_group(work, lane);
    }
    use = end;
    return true;
  }
  __device__ __forceinline__ void find_small_positions(Work& work) const {
    const Sequence& sequence = work.sequence;
    bool small = true;
#pragma unroll
    for (int i = 0; i < C.segments; ++i) {
      small = small && are_positions_small(p, sequence.q_position, sequence.q.length, sequence.segment(i));
    }
    work.positions_are_small = small;
  }
  /// Returns the uses whose keys a group's rows see; at least one, even if the rows see none.
  __device__ __forceinline__ Uses uses_of_group(const Work& work, int group) const {
    const int first_row = work.block.first_row + group * 64;
    const int rows = static_cast<int>(work.sequence.q.length * p.group.value);
    const int first_query = PackedRow(first_row, p.group).query;
    const int last_query = PackedRow(min(first_row + 64, rows) - 1, p.group).query;
    const KeysOfQueries<C> bounds(p, work.sequence, work.sequence.first, first_query);
    const int begin = bounds.of(first_query).begin;
    const int end = first_row < rows ? bounds.of(last_query).end : 0;
    Uses uses{work.first_use, work.end_use};
    const auto key = [&](int use) { return work.tiles.at(use - work.first_use).first; };
    while (uses.first + 1 < uses.end && key(uses.first) >= end) ++uses.first;
    while (uses.first + 1 < uses.end && key(uses.end - 1) + C.tile_kv <= begin) --uses.end;
    return uses;
  }
  __device__ __forceinline__ auto collector_of(int item) const {
    Work& work = shared.works[item % 2];
    return ListCollector<C, 32>{p, work.block, work.tiles, list_window<C>(memory)};
  }
  // Publishes a row tile when its list's ring is filled. If that is too small for the list, each half is refilled when
  // its tiles have been read: the copying warp signals that (release_granules) and awaits the refill (await_granules).
  __device__ __forceinline__ void publish_list(int item, ListPosition& at, int& halves) const {
    const auto& tiles = shared.works[item % 2].tiles;
    if (at.rank < tiles.ranks().end) {
      const auto collector = collector_of(item);
      if constexpr (C.skip == Skip::threshold) {
        if (tiles.descends) return publish_descending(item, tiles.ranks().end, halves);
      }
      int end = tiles.ranks().begin + C.list_granules();
#pragma unroll 1
      for (bool first = true; at.rank < tiles.ranks().end; first = false, end += C.list_granules() / 2) {
        if (!first) ptx::mbarrier_wait(granules_read(), static_cast<u32>(halves) & 1);
        collector.fill(at, end);
        if (first) {
          publish(item);
        } else {
          if (lane == 0) ptx::mbarrier_arrive(granules_there());
          ++halves;
        }
      }
    } else {
      publish(item);
    }
  }
  // The same for a walk from the last rank to the first.
  __device__ __forceinline__ void publish_descending(int item, int end, int& halves) const {
    const auto collector = collector_of(item);
    int begin = max(end - C.list_granules(), 0);
    collector.fill_between(begin, end);
    publish(item);
#pragma unroll 1
    while (begin > 0) {
      ptx::mbarrier_wait(granules_read(), static_cast<u32>(halves) & 1);
      end = begin;
      begin = max(end - C.list_granules() / 2, 0);
      collector.fill_between(begin, end);
      if (lane == 0) ptx::mbarrier_arrive(granules_there());
      ++halves;
    }
  }
  // The number of tiles in half a ring.
  static constexpr int half_ring() { return C.list_granules() / 2 / (C.tile_kv / C.granule); }
  /// Waits until the granules of tile i of a row tile are in the ring. Called before its copy.
  __device__ __forceinline__ void await_granules(int i, int& halves) const {
    if (i < 2 * half_ring() || i % half_ring() != 0) return;
    ptx::mbarrier_wait(granules_there(), static_cast<u32>(halves) & 1);
    ++halves;
  }
  /// Called when all have read tile i − stages. If it ends half a ring and more is to come, signals for a refill.
  __device__ __forceinline__ void release_granules(const Work& work, int i) const {
    constexpr int half = half_ring();
    static_assert(half > C.stages);
    const bool ends_half = i >= half && i % half == C.stages - 1;
    if (lane == 0 && ends_half && (i / half + 1) * half < work.tiles.count()) ptx::mbarrier_arrive(granules_read());
  }

  __device__ __forceinline__ void copy() const {
    int halves = 0;
#pragma unroll 1
    for (int item = 0;; ++item) {
      items().wait(item);
      if (item == shared.end) return;
      copy_tiles(shared.works[item % 2], halves);
      sync_copiers();
      if (lane == 0) items().release(item);
    }
  }
  // Looks up the boxes of the next tile before it waits for the buffer of this tile's values.
  __device__ __forceinline__ void copy_tiles(const Work& work, int& halves) const {
    TileBoxes boxes = boxes_of(work, work.first_use, halves);
#pragma unroll 1
    for (int use = work.first_use; use < work.end_use; ++use) {
      if (lane == 0 && use == work.drawing_use) ptx::mbarrier_arrive(nearly_copied());
      const int segment = C.segments == 2 ? boxes.tile.segment : 0;
      const KvParams& kv = p.kv[segment];
      acquire(keys(), use, C.k_bytes());
      copy_tile<C, KTile>(work, kv, maps->keys + segment, kv.k_strides, boxes, k_at(use), keys().full(use), lane,
                          maps->key_steps);
      const TileBoxes next = use + 1 < work.end_use ? boxes_of(work, use + 1, halves) : boxes;
      acquire(values(), use, C.v_bytes());
      if constexpr (C.tiles == Tiles::list) release_granules(work, use - work.first_use);
      copy_tile<C, VTile>(work, kv, maps->values + segment, kv.v_strides, boxes, v_at(use), values().full(use), lane,
                          maps->value_steps);
      boxes = next;
    }
  }
  __device__ __forceinline__ TileBoxes boxes_of(const Work& work, int use, int& halves) const {
    if constexpr (C.tiles == Tiles::list) await_granules(use - work.first_use, halves);
    const KvTile tile = work.tiles.at(use - work.first_use);
    return find_boxes<C>(work, p.kv[C.segments == 2 ? tile.segment : 0], tile, lane);
  }
  // The other lanes may issue copies only after lane 0 has set the expected bytes (expect_tx).
  __device__ __forceinline__ void acquire(const Ring<C.stages>& ring, int use, u32 bytes) const {
    if (lane == 0) ring.acquire(use, bytes);
    sync_copiers();
  }
  static __device__ __forceinline__ void sync_copiers() {
    if constexpr (kCopiers<C> > 1) __syncwarp();
  }

  /// Runs ahead of the consumers and replaces values that are not finite in tiles that may hide keys; the consumers
  /// wait for that (softmax/non_finite.cuh).
  static constexpr int kCheckers = C.descales_keys ? 1 : 2;  // warps
  __device__ __forceinline__ void check() const {
#pragma unroll 1
    for (int item = 0;; ++item) {
      items().wait(item);
      if (item == shared.end) return;
      Work& work = shared.works[item % 2];
#pragma unroll 1
      for (int use = work.first_use; use < work.end_use; ++use) {
        values().wait(use);
        if constexpr (C.multiplies_bytes()) {
          transpose_values(work, use);
          continue;
        }
        if (work.may_hide(work.tiles.at(use - work.first_use))) {
          constexpr int threads = kCheckers * 32;
          const auto keys = [&] { return work.keys_of(work.tiles.at(use - work.first_use)); };
          // Groups that skip the tile may read non_finite at the same time; both results are right for them.
          if (replace_values<C.type, VTile, threads>(v_at(use), thread % threads, keys)) work.non_finite = 1;
          ptx::fence_async_proxy();
        }
        __syncwarp();
        if (lane == 0) {
          // The buffer's previous phase has ended, but perhaps nobody waited for it, as checking tools require.
          if (use >= C.stages) checks().wait(use - C.stages);
          checks().publish(use);
          values().release(use);
        }
      }
      __syncwarp();
      if (lane == 0) items().release(item);
    }
  }
  /// Loads the descales of each tile's keys, and publishes them on the `full` barrier of the keys.
  __device__ __forceinline__ void load_descales() const {
    int halves = 0;
#pragma unroll 1
    for (int item = 0;; ++item) {
      items().wait(item);
      if (item == shared.end) return;
      const Work& work = shared.works[item % 2];
#pragma unroll 1
      for (int use = work.first_use; use < work.end_use; ++use) {
        keys().wait_empty(use);
        if constexpr (C.tiles == Tiles::list) await_granules(use - work.first_use, halves);
        int8_scores().load_keys(p, descales, work, work.tiles.at(use - work.first_use), use, lane);
        __syncwarp();
        if (lane == 0) keys().publish(use);
      }
      if (lane == 0) items().release(item);
    }
  }
  /// Transposes V of a tile for products of 8 bits (tile/transposed_bytes.cuh), and replaces values as check() does.
  __device__ __forceinline__ void transpose_values(Work& work, int use) const {
    static_assert(kCheckers == 2);
    const int warp = thread / 32 % kCheckers;
    const KvTile tile = work.tiles.at(use - work.first_use);
    const auto await_room = [&] { checks().wait_empty(use); };
    if (work.may_hide(tile)) {
      const int end = work.keys_of(tile);
      if (transpose_bytes<VTile, VtTile, true>(v_at(use), vt_at(use), warp, lane, end, await_room)) {
        work.non_finite = 1;
      }
    } else {
      transpose_bytes<VTile, VtTile, false>(v_at(use), vt_at(use), warp, lane, 0, await_room);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane != 0) return;
    checks().publish(use);
    values().release(use);
  }
};

}  // namespace tessera::cuda
