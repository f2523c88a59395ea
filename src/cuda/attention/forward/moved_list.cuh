// SPDX-License-Identifier: Apache-2.0
// How a forward by mma.sync moves a skip state on. Barriers of the block lie between its tiles, so that one warp brings
// together what all said of four tiles when four more have been walked.
#pragma once

#include "cuda/attention/forward/block_work.cuh"
#include "cuda/attention/sparse/skip_step.cuh"

namespace tessera::cuda {

/// Of configurations without `skip`: nothing.
template <FwdConfig C, class Online, bool moves = C.skip != Skip::none>
struct MovedList {
  __device__ __forceinline__ MovedList(const FwdParams& /*p*/, BlockMemory<C>& /*work*/) {}
  __device__ __forceinline__ void begin() {}
  template <class Scores>
  __device__ __forceinline__ typename Online::Rescale raise(Online& softmax, const Scores& s, float scale,
                                                            const KvTile& /*tile*/) {
    return softmax.raise(s, scale);
  }
  __device__ __forceinline__ void add(Online& /*softmax*/) {}
  __device__ __forceinline__ void end_walk(const Online& /*softmax*/) {}
  __device__ __forceinline__ void move() {}
};

template <FwdConfig C, class Online>
struct MovedList<C, Online, true> {
  static_assert(C.rows_a_warp() == 16 && !C.has_producer());

  const FwdParams& p;
  BlockMemory<C>& work;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  TileMeasure<C> measure;
  bool moved;  // whether this tile raised an origin

  __device__ __forceinline__ MovedList(const FwdParams& params, BlockMemory<C>& memory) : p(params), work(memory) {}

  /// Before the first tile.
  __device__ __forceinline__ void begin() {
    const int rows = rows_of_tile<C>(work) - warp * 16;
    if constexpr (C.skip == Skip::mass) {
      measure.begin(priors(), warp * 16, rows, lane);
    } else {
      measure.begin(rows, lane);
      if (warp != 0) return;
      u32* next = next_words();
      for (int word = lane; word < p.list.words; word += 32) next[word] = 0;
      __threadfence();
      __syncwarp();
    }
  }

  /// Online::raise() of a tile.
  template <class Scores>
  __device__ __forceinline__ typename Online::Rescale raise(Online& softmax, const Scores& s, float scale,
                                                            const KvTile& tile) {
    measure.enter(key_block_of(p.list, tile), lane, [&](int block, float value) { say(block, value); });
    if constexpr (C.skip == Skip::mass) {
      const auto rescale = softmax.raise(s, scale);
      measure.set_aside(softmax.sum[0]);
      moved = rescale.needed;
      return rescale;
    } else {
      return softmax.raise(s, scale, {Online::kSlack, Online::kSlack},
                           [&](int half, float maximum) { measure.see(half, maximum); });
    }
  }
  /// When its exponentials are in the sums.
  __device__ __forceinline__ void add(Online& softmax) {
    if constexpr (C.skip == Skip::mass) measure.add(softmax.sum[0], softmax.origin[0], moved);
  }

  /// After the last tile and a barrier.
  __device__ __forceinline__ void end_walk(const Online& softmax) {
    measure.finish(lane, [&](int block, float value) { say(block, value); });
    const int rows = rows_of_tile<C>(work) - warp * 16;
    if (end_rows<C>(measure, softmax, priors(), warp * 16, rows, lane)) work.unknown = 1;
  }

  /// When nobody reads the list any more but for barriers.
  __device__ __forceinline__ void move() {
    if (rows_of_tile<C>(work) <= 0) return;
    __syncthreads();
    if (warp == 0 && measure.walked > 0) bring_together(measure.walked / 4 - 1);
    __syncthreads();
    const SkipRow row(p, work.block);
    const u32* next = next_words();
#pragma unroll 1
    for (int word = warp; word < p.list.words; word += C.warps) {
      row.template move_word<C>(word, work.tiles, work.unknown != 0, lane, [&](int block) -> int {
        if constexpr (C.skip == Skip::mass) return row.codes[block];
        return static_cast<int>(__ldcg(next + block / 32) >> (block % 32) & 1);
      });
    }
  }

 private:
  __device__ __forceinline__ PackedRows priors() const {
    const SkipParams& skip = skip_of_params(p);
    return PackedRows(skip.lse, 4, skip.lse_strides, work.block, work.sequence.q.first, p.group);
  }
  __device__ __forceinline__ u32* next_words() const {
    const SkipParams& skip = skip_of_params(p);
    const int query_block = ptx::divide(work.block.first_row, p.list.block_q);
    const i64 head = static_cast<i64>(work.block.batch) * skip.heads + work.block.head;
    return skip.next + (head * skip.query_blocks + query_block) * p.list.words;
  }

  // Of four tiles, a lane's each.
  __device__ __forceinline__ void say(int block, float value) const {
    const int four = measure.walked / 4 - 1;
    if (warp == 0 && four > 0) bring_together(four - 1);
    if (lane >= 4) return;
    work.said[four & 1][warp][lane] = value;
    if (warp == 0) work.blocks[four & 1][lane] = block;
  }
  // By one warp, behind a barrier that all have reached since they said it.
  __device__ __forceinline__ void bring_together(int four) const {
    if (lane >= 4) return;
    const int block = work.blocks[four & 1][lane];
    if (block < 0) return;
    float all = work.said[four & 1][0][lane];
#pragma unroll
    for (int other = 1; other < C.warps; ++other) {
      const float value = work.said[four & 1][other][lane];
      all = C.skip == Skip::mass ? all + value : fmaxf(all, value);
    }
    const SkipRow row(p, work.block);
    if constexpr (C.skip == Skip::mass) {
      row.codes[block] = static_cast<unsigned char>(code_of_squares(all, rows_of_tile<C>(work)));
    } else if (all > row.threshold) {
      atomicOr(next_words() + block / 32, 1U << (block % 32));
    }
  }
};

}  // namespace tessera::cuda
