// SPDX-License-Identifier: Apache-2.0
// Which probabilities dropout keeps: docs/semantics.md section 7. One call of Philox serves the eight values that a
// thread holds of a 16 x 16 fragment, provided that the fragment begins at multiples of 16 of both positions.
#pragma once

#include "cuda/attention/tiles/packed_rows.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/tile/philox.cuh"
#include "shared/params.h"

namespace tessera::cuda {

/// The generator's key and the part of its counter that a block's values share.
struct DropoutDraws {
  u32 key0, key1;
  u32 offset;
  u32 head_batch;  // of the block's first head
  u32 threshold;

  DropoutDraws() = default;
  /// `head`: first query head of the block.
  __device__ __forceinline__ DropoutDraws(const DropoutParams& p, int batch, int head) {
    const u64 seed = p.seed_at != nullptr ? *p.seed_at : p.seed;
    const u64 from = p.offset_at != nullptr ? *p.offset_at : p.offset;
    key0 = static_cast<u32>(seed);
    key1 = static_cast<u32>(seed >> 32) ^ static_cast<u32>(from >> 32);
    offset = static_cast<u32>(from);
    head_batch = static_cast<u32>(p.first_head_batch + static_cast<i64>(batch) * p.heads + head);
    threshold = p.threshold;
  }

  __device__ __forceinline__ Philox philox(u32 key, u32 row, u32 head) const {
    return {key / 16 * 4 + key % 8 / 2, row / 16 * 8 + row % 8, head_batch + head, offset, key0, key1};
  }
  /// Returns which of a call's eight draws is that of this value.
  static __device__ __forceinline__ u32 number(u32 key, u32 row) {
    return key % 16 / 8 * 4 + row % 16 / 8 * 2 + key % 2;
  }
  __device__ __forceinline__ bool keeps(u32 key, u32 row, u32 head) const {
    return philox(key, row, head).draw(number(key, row)) < threshold;
  }
};

/// The work of a block that has DropoutDraws.
template <class Work>
concept DrawingWork = TileWork<Work> && requires(const Work& work) { DropoutDraws{work.dropout}; };

/// The positions of a thread's two rows of a 16 x 16 fragment, and their heads, counted from the block's first.
struct DropoutRows {
  u32 row[2];
  u32 head[2];

  /// Whether one call serves both rows.
  __device__ __forceinline__ bool are_aligned(int lane) const {
    return row[0] % 16 == static_cast<u32>(lane / 4) && row[1] == row[0] + 8 && head[0] == head[1];
  }
};

/// Bit 4·side + 2·half + i: whether value i of row `half` of the left (0) or right (1) 16 x 8 tile is kept. `key`:
/// position of the thread's first key. Only for fragments that one call serves.
__device__ __forceinline__ u32 kept_of_aligned_fragment(const DropoutDraws& draws, const DropoutRows& rows, u32 key) {
  const Philox random = draws.philox(key, rows.row[0], rows.head[0]);
  u32 kept = 0;
#pragma unroll
  for (u32 e = 0; e < 8; ++e) kept |= random.draw(e) < draws.threshold ? 1U << e : 0U;
  return kept;
}

/// The same for any fragment.
__device__ __forceinline__ u32 kept_of_fragment(const DropoutDraws& draws, const DropoutRows& rows, u32 key, int lane) {
  const u32 shared = key % 16 == static_cast<u32>(lane % 4 * 2) ? 4 : 1;  // values of a row that a call serves
  u32 kept = 0;
#pragma unroll 1
  for (u32 first = 0; first < 8; first += shared) {  // four values of the upper row, then four of the lower
    const u32 half = first / 4;
    const u32 row = half != 0 ? rows.row[1] : rows.row[0];
    const auto at = [key](u32 e) { return key + (e & 2) * 4 + (e & 1); };
    const Philox random = draws.philox(at(first), row, half != 0 ? rows.head[1] : rows.head[0]);
#pragma unroll 1
    for (u32 e = first; e < first + shared; ++e) {
      if (random.draw(DropoutDraws::number(at(e), row)) < draws.threshold)
        kept |= 1U << ((e & 2) * 2 + half * 2 + (e & 1));
    }
  }
  return kept;
}

/// What dropout requires of a configuration.
template <class Config>
concept DropoutConfig = requires(const Config& c) { int{c.tile_kv}; };

/// A thread's bits of 16 rows by tile_kv keys: byte k % 4 of word k / 4 is that of fragment k.
template <DropoutConfig auto C>
struct KeptBits {
  static constexpr int words = divide_up(C.tile_kv, 64);
  u32 word[words];

  /// Draws for 16 packed rows of the block from `first` on.
  template <DrawingWork Work>
  __device__ __forceinline__ void draw(const AttentionParams& p, const Work& work, int first, const KvTile& tile,
                                       int lane) {
    const auto keys = static_cast<u32>(work.sequence.segment(tile.segment).position);
    const auto queries = static_cast<u32>(work.sequence.q_position);
    const int row = work.block.first_row + first + lane / 4;
    const PackedRow upper(row, p.group);
    const PackedRow lower(row + 8, p.group);
    const DropoutRows rows{{queries + upper.query, queries + lower.query},
                           {static_cast<u32>(upper.head), static_cast<u32>(lower.head)}};
    const DropoutDraws draws = work.dropout;
    const auto key_of = [&](int k) { return keys + work.tiles.key(tile, k * 16) + lane % 4 * 2; };
    bool aligned = rows.are_aligned(lane);
#pragma unroll
    for (int k = 0; k < C.tile_kv / 16; ++k) aligned = aligned && key_of(k) % 16 == static_cast<u32>(lane % 4 * 2);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const int fragments = C.tile_kv / 16 - w * 4 < 4 ? C.tile_kv / 16 - w * 4 : 4;
      word[w] = 0;
      if (aligned) {
        // These calls are interleaved, because a call is a chain of ten products.
#pragma unroll
        for (int k = 0; k < fragments; ++k) {
          word[w] |= kept_of_aligned_fragment(draws, rows, key_of(w * 4 + k)) << (k * 8);
        }
      } else {
#pragma unroll 1
        for (int k = 0; k < fragments; ++k) {
          word[w] |= kept_of_fragment(draws, rows, key_of(w * 4 + k), lane) << (k * 8);
        }
      }
    }
  }

  /// Returns a mask for word i of fragment k as an A operand: ones for each half that is kept.
  __device__ __forceinline__ u32 mask(int k, int i) const {
    const u32 bits = word[k / 4] >> (k % 4 * 8 + i / 2 * 4 + i % 2 * 2);
    return ((bits & 1U) != 0 ? 0x0000ffffU : 0U) | ((bits & 2U) != 0 ? 0xffff0000U : 0U);
  }

  /// Whether value i of fragment k's left (0) or right (1) tile is kept.
  __device__ __forceinline__ bool keeps(int k, int side, int i) const {
    return (word[k / 4] >> (k % 4 * 8 + side * 4 + i) & 1) != 0;
  }

  /// Sets the dropped values of fragment k's left (0) or right (1) tile to 0.
  __device__ __forceinline__ void apply(float (&s)[4], int k, int side) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((word[k / 4] >> (k % 4 * 8 + side * 4 + i) & 1) == 0) s[i] = 0.0F;
    }
  }
};

}  // namespace tessera::cuda
