// SPDX-License-Identifier: Apache-2.0
// Advances a row tile's row of a skip state by one step, in place: from what the rows have measured of the tiles to
// codes and to bits, the next list. The caller owns the row: nothing reads this row of the list any more.
#pragma once

#include "cuda/attention/sparse/tile_measure.cuh"

namespace tessera::cuda {

inline constexpr int kCodeOfOne = 239;  // the code of mass 1; there are eight codes an octave
inline constexpr int kMostCode = 255;

/// The code of a tile, from the sum of its rows' squared masses.
__device__ __forceinline__ int code_of_squares(float sum, int rows) {
  return clamp(__float2int_rn(4.0F * ptx::log2(sum / static_cast<float>(rows))) + kCodeOfOne, 0, kMostCode);
}

/// The row of a list that a block owns.
struct SkipRow {
  const SkipParams& skip;
  const ListParams& list;
  u32* bits;
  unsigned char* codes;  // of the rule `mass`
  float threshold;

  __device__ __forceinline__ SkipRow(const AttentionParams& p, const Block& block)
      : skip(skip_of_params(p)), list(p.list), codes(nullptr) {
    const int query_block = ptx::divide(block.first_row, p.list.block_q);
    const i64* e = p.list.partial.entry_strides;
    bits = skip.bits + block.batch * e[0] + block.head * e[1] + query_block * e[2];
    if (skip.codes != nullptr) {
      const i64* c = skip.code_strides;
      codes = skip.codes + block.batch * c[0] + block.head * c[1] + query_block * c[2];
    }
    threshold = skip.thresholds[block.head * skip.threshold_stride];
  }

  /// Whether the row tile that walks `tiles` visits a key block if it is listed.
  template <FwdConfig C, class Tiles>
  __device__ __forceinline__ bool meets(const Tiles& tiles, int key_block) const {
    const int segment = C.segments == 1 || key_block < list.second_block ? 0 : 1;
    const int local = key_block - (segment == 0 ? 0 : list.second_block);
    const int granules = static_cast<int>(list.block_kv.value) / C.granule;
    return tiles.sees(segment, {local * granules, (local + 1) * granules});
  }

  /// A word of the list before the step, which of its blocks are computed, and the code of this lane's block.
  struct Word {
    u32 listed, computed;
    int code;
  };
  template <FwdConfig C>
  __device__ __forceinline__ Word read(int word, int lane) const {
    Word found{bits[word], 0, 0};
    found.computed = with_musts(skip, found.listed, word);
    const int key_block = word * 32 + lane;
    if (C.skip == Skip::mass && key_block < list.key_blocks) found.code = codes[key_block];
    return found;
  }

  /// Advances a word of the list; a whole warp calls this. For a tile that was walked, found(key block) returns its
  /// code, or with rule `threshold` whether it is kept.
  template <FwdConfig C, class Tiles, class Found>
  __device__ __forceinline__ void move_word(int word, const Word& before, const Tiles& tiles, bool unknown, int lane,
                                            Found found) const {
    const bool computed = (before.computed >> lane & 1) != 0;
    const int key_block = word * 32 + lane;
    const bool exists = key_block < list.key_blocks;
    bool kept = (before.listed >> lane & 1) != 0;
    if constexpr (C.skip == Skip::mass) {
      int code = 0;
      if (exists) {
        if (!computed) {
          code = min(before.code + skip.growth, kMostCode);
        } else if (unknown) {
          code = kMostCode;
        } else if (meets<C>(tiles, key_block)) {
          code = found(key_block);
        }
        codes[key_block] = static_cast<unsigned char>(code);
      }
      kept = static_cast<float>(code - kCodeOfOne) * 0.125F > threshold;
    } else if (computed) {
      kept = unknown || (exists && meets<C>(tiles, key_block) && found(key_block));
    }
    const u32 next = __ballot_sync(0xffffffffU, exists && kept);
    if (lane == 0) bits[word] = next;
  }
};

/// The rows in use of a row tile.
template <FwdConfig C, class Work>
__device__ __forceinline__ int rows_of_tile(const Work& work) {
  return min(static_cast<int>(work.sequence.q.length) - work.block.first_row, C.tile_q);
}

/// Advances a row tile's row of the list from what each warp's rows have measured, (warp, key block); a whole warp
/// calls this. wait() waits until all have measured; loads that precede it overlap the wait.
template <FwdConfig C, class Work, class Wait>
__device__ __forceinline__ void move_list_by_partials(const AttentionParams& p, const Work& work, const float* measured,
                                                      int lane, Wait wait) {
  const SkipRow row(p, work.block);
  const int rows = rows_of_tile<C>(work);
  SkipRow::Word before{};
  if (p.list.words > 0) before = row.template read<C>(0, lane);
  wait();
  const bool unknown = work.unknown != 0;
#pragma unroll 1
  for (int word = 0; word < p.list.words; ++word) {
    if (word > 0) before = row.template read<C>(word, lane);
    row.template move_word<C>(word, before, work.tiles, unknown, lane, [&](int block) -> int {
      float all = __ldcg(measured + block);
#pragma unroll
      for (int warp = 1; warp < C.warps; ++warp) {
        const float other = __ldcg(measured + warp * p.list.key_blocks + block);
        all = C.skip == Skip::mass ? all + other : fmaxf(all, other);
      }
      return C.skip == Skip::mass ? code_of_squares(all, rows) : static_cast<int>(all > row.threshold);
    });
  }
}

/// The same for a row tile that has walked no keys.
template <FwdConfig C, class Work>
__device__ __forceinline__ void move_unseen_list(const AttentionParams& p, const Work& work, int lane) {
  const int rows = rows_of_tile<C>(work);
  if (rows <= 0) return;
  if constexpr (C.skip == Skip::mass) {
    const SkipParams& skip = skip_of_params(p);
    const PackedRows lse(skip.lse, 4, skip.lse_strides, work.block, work.sequence.q.first, p.group);
#pragma unroll 1
    for (int row = lane; row < rows; row += 32) *reinterpret_cast<float*>(lse.writable(row)) = -kInfinity;
  }
  const SkipRow row(p, work.block);
#pragma unroll 1
  for (int word = 0; word < p.list.words; ++word) {
    row.template move_word<C>(word, row.template read<C>(word, lane), work.tiles, false, lane,
                              [](int /*block*/) { return 0; });
  }
}

}  // namespace tessera::cuda
