// SPDX-License-Identifier: Apache-2.0
// Values that are not finite. The products with V add 0 · v for every hidden key, which is NaN where v is NaN or
// infinite. So in the tiles that may hide keys zeros stand for such values; a block that met any adds them in the end,
// to the outputs of the rows that see them.
#pragma once

#include "cuda/policy/block_work.cuh"
#include "cuda/policy/element_mask.cuh"
#include "cuda/policy/epilogue.cuh"
#include "cuda/policy/mask.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"

namespace tessera::cuda {

/// Of the low 16 bits.
template <Element type>
__device__ __forceinline__ bool is_finite(u32 bits) {
  constexpr u32 infinity = type == Element::bf16 ? 0x7F80 : 0x7C00;
  return (bits & infinity) != infinity;
}

/// Of a tile in shared memory, by `threads` threads, while nobody else uses it. Whether this thread replaced any.
template <Element type, class Tile, int threads>
__device__ __forceinline__ bool replace_values(u32 tile, int thread) {
  constexpr bool whole_steps = Tile::bytes % (threads * 16) == 0;
  u32 sums[4] = {};  // of 0 · v: NaN where a v is not finite
#pragma unroll 2     // registers are short
  for (int step = 0; step < divide_up(Tile::bytes, threads * 16); ++step) {
    if (!whole_steps && (step * threads + thread) * 16 >= Tile::bytes) break;
    u32 value[4];
    ptx::load_shared_16(value, tile + (step * threads + thread) * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = ptx::fma_pair<type>(value[i], 0, sums[i]);
  }
  if (((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7FFF7FFF) == 0) return false;
#pragma unroll 1
  for (int at = thread * 16; at < Tile::bytes; at += threads * 16) {
    u32 value[4];
    ptx::load_shared_16(value, tile + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low = is_finite<type>(value[i]) ? value[i] & 0xFFFF : 0;
      const u32 high = is_finite<type>(value[i] >> 16) ? value[i] & 0xFFFF0000 : 0;
      ptx::store_shared_4(tile + at + i * 4, low | high);
    }
  }
  return true;
}

/// Adds what is not finite of two values to two outputs.
template <Element type, Element output>
__device__ __forceinline__ void spoil(char* outputs, u32 pair) {
  float value[2];
  ptx::unpack<type>(pair, value[0], value[1]);
  if (is_finite<type>(pair)) value[0] = 0.0F;
  if (is_finite<type>(pair >> 16)) value[1] = 0.0F;
  if constexpr (output == Element::fp32) {
    float2& at = *reinterpret_cast<float2*>(outputs);
    at = make_float2(at.x + value[0], at.y + value[1]);
  } else {
    u32& at = *reinterpret_cast<u32*>(outputs);
    float old[2];
    ptx::unpack<output>(at, old[0], old[1]);
    at = ptx::pack<output>(old[0] + value[0], old[1] + value[1]);
  }
}

/// The values that a block replaced, added to the outputs that see them. Rare, so in plain loops.
template <FwdConfig C, class Mask>
struct ReplacedValues {
  const FwdParams& p;
  const SharedWork<C>& work;
  const Epilogue<C>& epilogue;
  int warp_row;  // first row of the warp within the block
  int lane;

  /// After the outputs are stored; a warp has its own rows.
  __device__ __forceinline__ void add_to_outputs() const {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < work.tiles.count(); ++i) {
      const KvTile tile = work.tiles.at(i);
      if (!work.may_hide(tile)) continue;
      const int keys = work.sequence.segment(tile.segment).extent.length;
#pragma unroll 1
      for (int column = 0; column < C.tile_n; ++column) {
        const int key = work.tiles.key(tile, column);
        if (key < keys) add(tile, column, key);
      }
    }
  }
  __device__ __forceinline__ void add(const KvTile& tile, int column, int key) const {
    constexpr int output_bytes = bytes_of(C.output);
    const PackedRows out = epilogue.outputs();
    const int segment = C.segments == 2 ? tile.segment : 0;
    const KvParams& kv = p.kv[segment];
    const Extent extent = work.sequence.segment(segment).extent;
    const KvRows<C.source, C.trusts> value_rows(kv, kv.v, kv.v_strides, extent, work.block.batch, work.block.kv_head);
    const char* values = value_rows.at(0, key);
    const int rows = min(epilogue.used_rows(), warp_row + C.rows_a_warp());
#pragma unroll 1
    for (int dim = lane * 2; dim < round_up(p.dv, 64); dim += 64) {
      const u32 pair = dim < p.dv ? *reinterpret_cast<const u32*>(values + dim * 2) : 0;
      const bool spoils = !is_finite<C.type>(pair) || !is_finite<C.type>(pair >> 16);
      if (!__any_sync(0xffffffffU, spoils)) continue;
#pragma unroll 1
      for (int row = warp_row; row < rows; ++row) {
        if (spoils && sees(row, tile, column, key))
          spoil<C.type, C.output>(out.writable(row) + dim * output_bytes, pair);
      }
    }
  }

  // Whether a row of the block gives a key any weight.
  __device__ __forceinline__ bool sees(int row, const KvTile& tile, int column, int key) const {
    const PackedRow at(work.block.first_row + row, p.group);
    const Segment& segment = work.sequence.segment(tile.segment);
    const RowBounds<C> bounds(p, work.sequence, segment, at.query);
    const Interval visible = bounds.of(at.query);
    if (key < visible.begin || key >= visible.end) return false;
    if constexpr (C.tests_elements()) {
      const ElementMask<C, Mask> mask{p, work};
      const ListReader reader = mask.list();
      ListedKeys listed{reader};
      if (mask.hides(at, tile, column, key, listed)) return false;
    }
    if constexpr (C.dropout) {
      return work.dropout.keeps(static_cast<u32>(segment.position) + key,
                                static_cast<u32>(work.sequence.q_position) + at.query, at.head);
    }
    return true;
  }
};

}  // namespace tessera::cuda
