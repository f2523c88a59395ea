// SPDX-License-Identifier: Apache-2.0
// The key pass of backward/wgmma.cuh. A block owns tile_kv keys of one source and key head: K and V stay in shared
// memory, and Q and dO of all query heads that share the key head are streamed. The sums over the rows are dK and dV.
// Score fragments are transposed: their rows are keys.
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/backward/lists/pass_tiles.cuh"
#include "cuda/attention/backward/non_finite_rows.cuh"
#include "cuda/attention/backward/query_range.cuh"
#include "cuda/attention/backward/query_sums.cuh"
#include "cuda/attention/backward/row_values.cuh"
#include "cuda/attention/backward/transposed_scores.cuh"
#include "cuda/attention/tiles/tile_boxes.cuh"
#include "cuda/ptx/global.cuh"

namespace tessera::cuda {

/// With BwdConfig::ordered: the block of the same head that adds to dQ before this one.
template <bool ordered>
struct SumOrder {};
template <>
struct SumOrder<true> {
  int keys_before;      // tiles of keys of the head up to and including that block's
  int end_tile_before;  // end of the tiles of rows to which it adds
};

/// With BwdConfig::splits_rows: the part of the rows that a block has.
template <bool splits>
struct OwnPart {};
template <>
struct OwnPart<true> {
  KeyPart part;
};

/// With BwdConfig::walks_heads_together(): the tile of rows at which the walk begins, and its direction: 1 to later
/// tiles, −1 to earlier ones.
template <bool heads_together>
struct RowsWalk {};
template <>
struct RowsWalk<true> {
  int begin, step;
};

template <BwdConfig B_, class User>
struct KeySide {
  static constexpr BwdConfig B = B_;
  static constexpr FwdConfig C = B.as_forward();
  struct Work : KeyWork<C>,
                ListedCount<B.has_list()>,
                SumOrder<B.ordered>,
                RowsWalk<B.walks_heads_together()>,
                OwnPart<B.splits_rows> {
    DropoutDraws dropout;
  };
  using Listed = ListedRowTiles<B, Work>;
  using Walk = BwdWalk<B>;
  using Place = QueryTile;
  /// A streamed tile. `cut`: the interval mask or the list may hide elements; `hides`: elements may be hidden or
  /// dropped.
  struct Tile : QueryTile {
    bool cut;
    bool hides;
    bool may_be_non_finite;  // if it hides: whether a checker warp must search its rows
  };
  using Kept = KeptOfKeys<C>;
  using Scores = Accumulator<1, C.tile_q / 8>;

  const BwdParams& params;
  const BwdTensorMaps* maps;
  const Work& work;

  /// Finds the work of block `index`; every thread calls it. Returns false if there is none: no keys, or a part of the
  /// rows that sees none of them.
  static __device__ __forceinline__ bool find(const BwdParams& params, int index, Work& work) {
    if constexpr (B.splits_rows) {
      if (!find_part(params, index, work)) return false;
    } else {
      if (!static_cast<KeyWork<C>&>(work).find(params, index)) return false;
    }
    if constexpr (C.dropout) work.dropout = DropoutDraws(params.forward.dropout, work.batch, work.first_head);
    if constexpr (B.has_list()) work.listed = Listed{params, work}.count(static_cast<int>(threadIdx.x) % 32);
    if constexpr (B.ordered) {
      const auto before = work.find_seen_before();
      work.keys_before = before.count;
      work.end_tile_before = before.end_tile;
    }
    if constexpr (B.walks_heads_together()) find_walk(params, index, work);
    return true;
  }
  // The blocks of a part are neighbours in the grid, so that they read its rows at the same time.
  static __device__ __forceinline__ bool find_part(const BwdParams& params, int index, Work& work) {
    const RowParts& parts = params.row_parts;
    const int part = ptx::divide(index, parts.key_blocks);
    const int key_block = static_cast<int>(index - part * parts.key_blocks.value);
    if (!static_cast<KeyWork<C>&>(work).find(params, key_block)) return false;
    // If no row sees the keys, only part 0 runs, and stores zeros.
    const int end_tile = work.first_tile + work.tiles;
    const int first = work.first_tile / parts.tiles;
    const int last = max(end_tile - 1, 0) / parts.tiles;
    if (part < first || part > last) return false;
    work.part = {key_block, part - first, last - first + 1, key_block * parts.parts};
    const int begin = part * parts.tiles;
    work.set_tiles({max(work.first_tile, begin), min(end_tile, begin + parts.tiles)});
    return true;
  }
  // With compressed keys, the intervals of rows of a head's blocks begin far apart, end together, and have more bytes
  // than L2 holds. Blocks share reads and sums in L2 only while they are at the same rows. The blocks of the first wave
  // begin together at the last row and walk down; they end one after another, the block of the last keys first. Each is
  // replaced by a block of the second wave, which walks up from its own first row. These first rows lie as far apart as
  // the blocks begin in time, so the blocks soon are at the same rows again, and end together. Hence waves alternate
  // the direction.
  static __device__ __forceinline__ void find_walk(const BwdParams& params, int index, Work& work) {
    const bool rises = B.walks_serpentine() && (ptx::divide(index, params.wave_blocks) & 1) != 0;
    work.begin = work.first_tile + (rises ? 0 : work.tiles - 1);
    work.step = rises ? 1 : -1;
  }
  __device__ __forceinline__ int count() const { return B.has_list() ? work.listed : work.count(params.forward); }
  __device__ __forceinline__ Walk walk() const { return begin_walk<B>(Listed{params, work}); }
  /// Advances the walk to tile i and returns it. With a list, a whole warp calls this.
  __device__ __forceinline__ Place next_tile(PassedWalk<B> walk, int i, int lane) const {
    if constexpr (B.has_list()) {
      return Listed{params, work}.next(walk, lane);
    }
    return place(i);
  }
  /// By default the walk goes from the first rows to the last, head after head. With walks_heads_together() it visits
  /// each tile of rows for all heads, in the direction of find_walk(): from the last rows to the first, or, with
  /// compressed keys, alternating by wave.
  __device__ __forceinline__ Place place(int i) const {
    if constexpr (B.walks_heads_together()) {
      const int step = ptx::divide_by_more_than_one(2 * i, params.twice_heads);
      return {i - step * static_cast<int>(params.forward.heads_a_kv.value), (work.begin + step * work.step) * C.tile_q};
    }
    return work.tile(i);
  }
  __device__ __forceinline__ Tile describe(const Place& tile) const {
    const bool cut = B.list_elements || work.is_cut(tile);
    return {tile, cut, C.dropout || tests_mask<C>(tile) || cut, true};
  }

  /// Copies K. By one thread.
  template <class Tile>
  __device__ __forceinline__ void copy_own_qk(u32 to, u32 barrier) const {
    const KvParams& kv = params.forward.kv[segment()];
    copy_rows<Tile>(&maps->keys[segment()], kv.k_strides, to, barrier, work.kv_head, first_row(), work.batch);
  }
  /// Copies V. By one thread.
  template <class Tile>
  __device__ __forceinline__ void copy_own_ov(u32 to, u32 barrier) const {
    const KvParams& kv = params.forward.kv[segment()];
    copy_rows<Tile>(&maps->values[segment()], kv.v_strides, to, barrier, work.kv_head, first_row(), work.batch);
  }
  /// Copies Q and dO of a tile. By one thread.
  template <class QTile, class OTile>
  __device__ __forceinline__ void copy(const QueryTile& tile, u32 q_to, u32 o_to, u32 barrier) const {
    const FwdParams& p = params.forward;
    const int head = work.first_head + tile.head;
    const int row = work.q.first + tile.first;
    copy_rows<QTile>(&maps->q, p.q_strides, q_to, barrier, head, row, work.batch);
    copy_rows<OTile>(&maps->dout, params.dout_strides, o_to, barrier, head, row, work.batch);
  }

  struct OwnValues {};
  static __device__ __forceinline__ OwnValues own_values(int /*warp_row*/, int /*lane*/) { return {}; }
  static constexpr int kArrays = B.sink ? 3 : 2;          // arrays of RowValues that are read
  static constexpr int kLaneRows = (C.tile_q + 31) / 32;  // at most; a lane has rows lane, lane + 32, …
  /// LSE, δ and weights of a lane's rows.
  struct Values {
    float of[kArrays][kLaneRows];
    bool finite;
  };
  /// Loads the values of a tile's rows; a whole warp calls this. Rows behind the end of the sequence get zeros; their
  /// elements are hidden.
  __device__ __forceinline__ Values load_row_values(const Tile& tile, int lane) const {
    const RowValues& from = params.values;
    const float* const arrays[3] = {from.lse, from.delta, from.weight};
    const i64 first =
        (work.first_head + tile.head) * from.rows + first_value(params.forward, work.q, work.batch) + tile.first + lane;
    Values values;
    values.finite = tile.first + C.tile_q <= work.q.length;
#pragma unroll
    for (int array = 0; array < kArrays; ++array) {
#pragma unroll
      for (int n = 0; n < kLaneRows; ++n) {
        const bool is_row = tile.first + n * 32 + lane < work.q.length;
        values.of[array][n] = is_row ? read_value(arrays[array] + first + n * 32) : 0.0F;
      }
    }
    return values;
  }
  /// Stores them to shared memory. Returns whether Q or dO of a row may have a value that is not finite. Such a row has
  /// an LSE or δ that is not finite, unless a score function bounds its products. Rows behind the end of the sequence
  /// count too, as they are not known. So do rows that the forward left empty, whose LSE is +∞; describe() relies on
  /// that for lists that truncate.
  __device__ __forceinline__ bool store_row_values(const Values& values, u32 to, int lane) const {
    bool finite = values.finite;
#pragma unroll
    for (int n = 0; n < kLaneRows; ++n) {
      const int row = n * 32 + lane;
      if (C.tile_q % 32 != 0 && row >= C.tile_q) break;
#pragma unroll
      for (int array = 0; array < kArrays; ++array) {
        const float value = values.of[array][n];
        if (array < 2) finite = finite && fabsf(value) < kInfinity;
        ptx::store_shared_4(to + (array * C.tile_q + row) * 4, __float_as_uint(value));
      }
      if constexpr (B.has_weights() && !B.sink) {
        ptx::store_shared_4(to + (2 * C.tile_q + row) * 4, 0x3f800000U);
      }
    }
    return !__all_sync(kAllLanes, finite);
  }
  /// Sets the row values of rows that are not finite to NaN, so that the gradients of keys that see them become NaN.
  /// With dropout, if only dO is not finite, LSE stays, because dV of a dropped element does not depend on dO.
  template <class NonFinite>
  __device__ __forceinline__ void poison(const NonFinite& rows, u32 values, int lane) const {
#pragma unroll 1
    for (int row = lane; row < C.tile_q; row += 32) {
      const int by = rows.of(row);
      if (by == 0 || (B.truncates && ptx::load_shared_4(values + row * 4) == kInfinity)) continue;
      if (!C.dropout || (by & kNonFiniteQk) != 0) ptx::store_shared_4(values + row * 4, 0x7fffffffU);
      if constexpr (C.dropout) {
        ptx::store_shared_4(values + (C.tile_q + row) * 4, 0x7fffffffU);
        ptx::store_shared_4(values + (2 * C.tile_q + row) * 4, 0x7fffffffU);
      }
    }
  }
  /// Reads one of RowValues' arrays, as store_row_values() has stored it, for a thread's two columns of the n-th
  /// 8-column tile; at() selects the value of element `e`.
  template <int array>
  static __device__ __forceinline__ float2 values(const OwnValues& /*own*/, u32 from, int n, int lane) {
    float2 values;
    ptx::load_shared_8(values.x, values.y, from + (array * C.tile_q + n * 8 + lane % 4 * 2) * 4);
    return values;
  }
  static __device__ __forceinline__ float at(const float2& values, int e) { return e % 2 == 0 ? values.x : values.y; }

  using Hidden = typename TransposedScores<C, User>::Hidden;
  __device__ __forceinline__ Hidden load_hidden(const Tile& tile, int warp_row, int lane) const {
    return TransposedScores<C, User>{params.forward, work, warp_row, lane}.load_hidden(tile);
  }
  __device__ __forceinline__ void finish(Scores& s, Scores& derivatives, const Tile& tile, const Hidden& hidden,
                                         int warp_row, int lane) const {
    const TransposedScores<C, User> scores{params.forward, work, warp_row, lane};
    scores.template finish<B.differentiates()>(s, derivatives, tile, tile.cut, hidden);
  }
  __device__ __forceinline__ void draw(Kept& kept, const Tile& tile, int warp_row, int lane) const {
    kept.draw(work, work.dropout, warp_row, tile, lane);
  }

  __device__ __forceinline__ bool has_row(const Place& tile, int row) const {
    return tile.first + row < work.q.capacity;
  }
  /// Returns the address of a tile's sums of dQ.
  __device__ __forceinline__ float* query_sums(const Place& tile) const {
    static_assert(C.tile_q % kSumRows == 0);
    return query_sums_of<B.d>(params, work.q, work.batch, work.first_head + tile.head, tile.first / kSumRows, 0);
  }

  /// Whether this block is the first to add to a tile's sums, because its rows see no earlier keys.
  __device__ __forceinline__ bool is_first(const Place& tile) const {
    return tile.first / C.tile_q >= work.end_tile_before;
  }
  /// If it is not: waits until the block with the nearest earlier keys that the rows see has added its share.
  __device__ __forceinline__ void await_turn(const Place& tile) const {
    ptx::await_count(added(tile), work.keys_before);
    ptx::fence_sums();
  }
  /// Tells the block that adds next that this block's share has been added.
  __device__ __forceinline__ void end_turn(const Place& tile) const {
    ptx::fence_sums();
#pragma unroll
    for (int part = C.tile_q / kSumRows - 1; part >= 0; --part) {
      if (part == 0 || has_row(tile, part * kSumRows)) {
        ptx::raise_count(added(tile) + part, work.first_key / C.tile_kv + 1);
      }
    }
  }

  /// `scratch`: with adds_dq(), kStoreScratchBytes of shared memory for the warp.
  template <class Sums>
  __device__ __forceinline__ void store_qk(Sums& dk, int warp_row, int lane, u32 scratch = 0) const {
    store(dk, params.dk[segment()], params.forward.d, params.forward.scale, warp_row, lane, scratch);
  }
  template <class Sums>
  __device__ __forceinline__ void store_ov(Sums& dv, int warp_row, int lane, u32 scratch = 0) const {
    const float factor = C.dropout ? params.forward.dropout.scale : 1.0F;
    store(dv, params.dv[segment()], params.forward.dv, factor, warp_row, lane, scratch);
  }

 private:
  template <class Sums>
  __device__ __forceinline__ void store(Sums& sums, const KeyGradient& out, int columns, float factor, int warp_row,
                                        int lane, [[maybe_unused]] u32 scratch) const {
    if constexpr (B.adds_dq() && B.gradient != Element::fp32) {
      store_key_gradient_through<B.gradient>(scratch, sums, factor, columns, {work, warp_row, out}, lane);
    } else {
      store_key_gradient<B.gradient, C>(params, work, warp_row, lane, sums, out, columns, factor);
    }
  }
  __device__ __forceinline__ int* added(const Place& tile) const {
    return params.query_sums.added +
           sum_tile_of(params, work.q, work.batch, work.first_head + tile.head, tile.first / kSumRows);
  }
  __device__ __forceinline__ int first_row() const { return work.keys.extent.first + work.first_key; }
  __device__ __forceinline__ int segment() const { return C.segments == 2 ? work.segment : 0; }
};

}  // namespace tessera::cuda
