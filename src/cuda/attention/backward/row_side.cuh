// SPDX-License-Identifier: Apache-2.0
// The row pass of backward/wgmma.cuh. A block owns tile_q query rows of one head: Q and dO stay in shared memory, and K
// and V of the keys that the rows see are streamed. The sum over the keys is dQ.
#pragma once

#include "cuda/attention/backward/gradient_store.cuh"
#include "cuda/attention/backward/lists/pass_tiles.cuh"
#include "cuda/attention/backward/row_values.cuh"
#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/scores/callables.cuh"
#include "cuda/attention/scores/dropout.cuh"
#include "cuda/attention/scores/finish_scores.cuh"
#include "cuda/attention/tiles/tile_boxes.cuh"

namespace tessera::cuda {

template <BwdConfig B_, class User>
struct RowSide {
  static constexpr BwdConfig B = B_;
  static constexpr FwdConfig C = B.as_forward();
  struct Work : SharedWork<C>, ListedCount<B.has_list()> {};
  using Listed = ListedKeyTiles<B, Work>;
  using Walk = BwdWalk<B>;
  using Place = KvTile;
  /// A streamed tile. `hides`: elements may be hidden or dropped.
  struct Tile : KvTile {
    bool hides;
    bool may_be_non_finite;  // as in KeySide::Tile
  };
  using Kept = KeptBits<C>;
  using Scores = Accumulator<1, C.tile_kv / 8>;

  const BwdParams& params;
  const BwdTensorMaps* maps;
  const Work& work;

  /// Finds the work of block `index`; every thread calls it. Returns whether the block has rows.
  static __device__ __forceinline__ bool find(const BwdParams& params, int index, Work& work) {
    const FwdParams& p = params.forward;
    if (!work.find(p, Block::of<C>(p, index))) return false;
    if constexpr (C.dropout) work.dropout = DropoutDraws(p.dropout, work.block.batch, work.block.head);
    if constexpr (B.has_list()) work.listed = Listed{params, work}.count(static_cast<int>(threadIdx.x) % 32);
    return true;
  }
  __device__ __forceinline__ int count() const { return B.has_list() ? work.listed : work.tiles.count(); }
  __device__ __forceinline__ Walk walk() const { return begin_walk<B>(Listed{params, work}); }
  /// Advances the walk to tile i and returns it. With a list, a whole warp calls this.
  __device__ __forceinline__ Place next_tile(PassedWalk<B> walk, int i, int lane) const {
    if constexpr (B.has_list()) return Listed{params, work}.next(walk, lane);
    return place(i);
  }
  __device__ __forceinline__ Place place(int i) const { return work.tiles.at(i); }
  __device__ __forceinline__ Tile describe(const Place& tile) const {
    return {tile, work.may_hide(tile) || B.truncates, true};
  }

  /// Copies Q. By one thread.
  template <class Tile>
  __device__ __forceinline__ void copy_own_qk(u32 to, u32 barrier) const {
    copy_rows<Tile>(&maps->q, params.forward.q_strides, to, barrier, work.block.head, first_row(), work.block.batch);
  }
  /// Copies dO. By one thread.
  template <class Tile>
  __device__ __forceinline__ void copy_own_ov(u32 to, u32 barrier) const {
    copy_rows<Tile>(&maps->dout, params.dout_strides, to, barrier, work.block.head, first_row(), work.block.batch);
  }
  /// Copies K of a tile. By one thread.
  template <class KTile>
  __device__ __forceinline__ void copy_qk(const KvTile& tile, u32 to, u32 barrier) const {
    copy_keys<KTile>(segment_of(tile), first_key(tile), to, barrier);
  }
  /// Copies V of a tile. By one thread.
  template <class VTile>
  __device__ __forceinline__ void copy_ov(const KvTile& tile, u32 to, u32 barrier) const {
    copy_values<VTile>(segment_of(tile), first_key(tile), to, barrier);
  }
  /// Copies K and V of a tile. By one thread.
  template <class KTile, class VTile>
  __device__ __forceinline__ void copy(const KvTile& tile, u32 k_to, u32 v_to, u32 barrier) const {
    const int segment = segment_of(tile);
    const int row = first_key(tile);
    copy_keys<KTile>(segment, row, k_to, barrier);
    copy_values<VTile>(segment, row, v_to, barrier);
  }

  /// LSE, δ and weight of a thread's two rows.
  struct OwnValues {
    float2 of[3];
  };
  __device__ __forceinline__ OwnValues own_values(int warp_row, int lane) const {
    const int row = work.block.first_row + warp_row + lane / 4;
    const RowValue upper = row_value<B>(params, work, row);
    const RowValue lower = row_value<B>(params, work, row + 8);
    return {{{upper.lse, lower.lse}, {upper.delta, lower.delta}, {upper.weight, lower.weight}}};
  }
  /// LSE and δ of a block's rows stay in registers, so nothing is loaded or stored here. They do not tell whether keys
  /// are finite: store_row_values() returns true, and the checker warps search K of every tile that hides an element
  /// (BwdProducer::check).
  struct Values {};
  __device__ __forceinline__ Values load_row_values(const Tile& /*tile*/, int /*lane*/) const { return {}; }
  __device__ __forceinline__ bool store_row_values(const Values& /*values*/, u32 /*to*/, int /*lane*/) const {
    return true;
  }
  template <class NonFinite>
  __device__ __forceinline__ void poison(const NonFinite& /*keys*/, u32 /*values*/, int /*lane*/) const {}
  /// Returns one of RowValues' arrays for a thread's two rows; at() selects the value of element `e` of an 8-column
  /// tile.
  template <int array>
  static __device__ __forceinline__ float2 values(const OwnValues& own, u32 /*from*/, int /*n*/, int /*lane*/) {
    return own.of[array];
  }
  static __device__ __forceinline__ float at(const float2& values, int e) { return e / 2 == 0 ? values.x : values.y; }

  struct Hidden {};  // no kernel computes mask bits for the row pass
  static __device__ __forceinline__ Hidden load_hidden(const Tile& /*tile*/, int /*warp_row*/, int /*lane*/) {
    return {};
  }
  __device__ __forceinline__ void finish(Scores& s, Scores& derivatives, const Tile& tile, Hidden /*hidden*/,
                                         int warp_row, int lane) const {
    const FinishScores<C, User, Work> scores{params.forward, work, warp_row, lane};
    scores.template finish<B.differentiates()>(s, tile, &derivatives);
  }
  __device__ __forceinline__ void draw(Kept& kept, const Tile& tile, int warp_row, int lane) const {
    kept.draw(params.forward, work, warp_row, tile, lane);
  }

  template <class Sums>
  __device__ __forceinline__ void store_qk(const Sums& dq, int warp_row, int lane, u32 /*scratch*/ = 0) const {
    store_query_gradient<B.gradient>(params, work, warp_row, lane, dq);
  }

 private:
  static __device__ __forceinline__ int segment_of(const KvTile& tile) { return C.segments == 2 ? tile.segment : 0; }
  __device__ __forceinline__ int first_key(const KvTile& tile) const {
    return work.sequence.segment(segment_of(tile)).extent.first + tile.first;
  }
  template <class KTile>
  __device__ __forceinline__ void copy_keys(int segment, int row, u32 to, u32 barrier) const {
    copy_rows<KTile>(&maps->keys[segment], params.forward.kv[segment].k_strides, to, barrier, work.block.kv_head, row,
                     work.block.batch);
  }
  template <class VTile>
  __device__ __forceinline__ void copy_values(int segment, int row, u32 to, u32 barrier) const {
    copy_rows<VTile>(&maps->values[segment], params.forward.kv[segment].v_strides, to, barrier, work.block.kv_head, row,
                     work.block.batch);
  }
  __device__ __forceinline__ int first_row() const { return work.sequence.q.first + work.block.first_row; }
};

}  // namespace tessera::cuda
