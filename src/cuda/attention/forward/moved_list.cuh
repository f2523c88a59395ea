// SPDX-License-Identifier: Apache-2.0
// Moves a skip state on by a step, in the forward by mma.sync. Barriers of the block separate its tiles, so that one
// warp can reduce what all warps have measured of four tiles after four more tiles.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/softmax/warp_products.cuh"
#include "cuda/attention/sparse/skip_step.cuh"

namespace tessera::cuda {

/// An online softmax that also measures the tiles of a list by the rows of its warp, and moves the list on at the end.
template <FwdConfig C>
struct MovingSoftmax : Softmax<1, 15, C.rounded_sums> {
  using Online = Softmax<1, 15, C.rounded_sums>;
  static_assert(C.rows_a_warp() == 16 && !C.has_producer());

  const FwdParams* params;
  BlockMemory<C>* memory;
  TileMeasure<C> measure;

  /// Called before the first tile.
  __device__ __forceinline__ void begin(const FwdParams& p, BlockMemory<C>& work) {
    params = &p;
    memory = &work;
    if constexpr (C.skip == Skip::mass) {
      measure.begin(priors(), warp() * 16, rows(), lane());
    } else {
      measure.begin(rows(), lane());
      if (warp() != 0) return;
      u32* next = next_words();
      for (int word = lane(); word < p.list.words; word += 32) next[word] = 0;
      __threadfence();
      __syncwarp();
    }
  }

  /// Called before a tile's raise().
  __device__ __forceinline__ void enter(const KvTile& tile) {
    measure.enter(key_block_of(params->list, tile), lane(), scale(), online(), *this);
  }
  template <int key_tiles>
  __device__ __forceinline__ typename Online::Rescale raise(const Accumulator<1, key_tiles>& s, float scale) {
    const auto rescale = Online::raise(s, scale);
    if constexpr (C.skip == Skip::mass) {
      if (rescale.needed) measure.rescale(rescale.factor[0]);
    } else {
#pragma unroll
      for (const auto& tile : s.tile[0]) measure.see(tile);
    }
    return rescale;
  }

  /// Called after the last tile and a barrier.
  __device__ __forceinline__ void end_walk() {
    measure.finish(lane(), scale(), online(), *this);
    if (end_rows<C>(measure, online(), priors(), warp() * 16, rows(), lane())) memory->unknown = 1;
  }

  /// Stores the number that was measured of a tile of four; one lane for each of the four tiles calls this.
  __device__ __forceinline__ void store(int tile, int block, float number) const {
    const int four = measure.walked / 4 - 1;
    if (warp() == 0 && four > 0) bring_together(four - 1);
    memory->measured[four & 1][warp()][tile] = number;
    if (warp() == 0) memory->blocks[four & 1][tile] = block;
  }

  /// Moves the list on, at the end of the block. It begins with a barrier, behind which nobody reads the list any more.
  __device__ __forceinline__ void move() const {
    BlockMemory<C>& work = *memory;
    if (rows_of_tile<C>(work) <= 0) return;
    __syncthreads();
    if (warp() == 0 && measure.walked > 0) bring_together(measure.walked / 4 - 1);
    __syncthreads();
    const SkipRow row(*params, work.block);
    const u32* next = next_words();
    const bool unknown = work.unknown != 0;
#pragma unroll 1
    for (int word = warp(); word < params->list.words; word += C.warps) {
      const SkipRow::Word before = row.template read<C>(word, lane());
      row.template move_word<C>(word, before, work.tiles, unknown, lane(), [&](int block) -> int {
        if constexpr (C.skip == Skip::mass) return before.code;  // for a walked tile already this step's
        return static_cast<int>(__ldcg(next + block / 32) >> (block % 32) & 1);
      });
    }
  }

 private:
  __device__ __forceinline__ Online& online() { return *this; }
  __device__ __forceinline__ float scale() const { return WarpProducts<C>::softmax_scale(*params, *memory); }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  /// Returns the number of rows that are used, from the warp's first on.
  __device__ __forceinline__ int rows() const { return rows_of_tile<C>(*memory) - warp() * 16; }
  __device__ __forceinline__ PackedRows priors() const {
    const SkipParams& skip = skip_of_params(*params);
    return PackedRows(skip.lse, 4, skip.lse_strides, memory->block, memory->sequence.q.first, params->group);
  }
  __device__ __forceinline__ u32* next_words() const {
    const SkipParams& skip = skip_of_params(*params);
    const Block& block = memory->block;
    const int query_block = ptx::divide(block.first_row, params->list.block_q);
    const i64 head = static_cast<i64>(block.batch) * skip.heads + block.head;
    return skip.next + (head * skip.query_blocks + query_block) * params->list.words;
  }

  // Reduces what all warps have measured of a group of four tiles. One warp calls this after a barrier that follows
  // their measurements.
  __device__ __forceinline__ void bring_together(int four) const {
    if (lane() >= 4) return;
    const BlockMemory<C>& work = *memory;
    const int block = work.blocks[four & 1][lane()];
    if (block < 0) return;
    float all = work.measured[four & 1][0][lane()];
#pragma unroll
    for (int other = 1; other < C.warps; ++other) {
      const float value = work.measured[four & 1][other][lane()];
      all = C.skip == Skip::mass ? all + value : fmaxf(all, value);
    }
    const SkipRow row(*params, work.block);
    if constexpr (C.skip == Skip::mass) {
      row.codes[block] = static_cast<unsigned char>(code_of_squares(all, rows_of_tile<C>(work)));
    } else if (all > row.threshold) {
      atomicOr(next_words() + block / 32, 1U << (block % 32));
    }
  }
};

/// The softmax of a configuration.
template <FwdConfig C, int row_tiles, bool moves = C.skip != Skip::none>
struct OnlineSoftmax {
  using type = Softmax<row_tiles, 15, C.rounded_sums>;
};
template <FwdConfig C>
struct OnlineSoftmax<C, 1, true> {
  using type = MovingSoftmax<C>;
};

}  // namespace tessera::cuda
