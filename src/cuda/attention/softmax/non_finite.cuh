// SPDX-License-Identifier: Apache-2.0
// Values of V that are not finite. P·V adds 0 · v for every hidden key, which is NaN if v is NaN or infinite. So in
// tiles that may hide keys such values are replaced by zeros. A block that has replaced any adds them at the end to the
// outputs of the rows that see them. Rows of a tile behind the end of a sequence are treated alike, but no row sees
// them.
#pragma once

#include "cuda/attention/kv/kv_source.cuh"
#include "cuda/attention/scores/element_mask.cuh"
#include "cuda/attention/softmax/epilogue.cuh"
#include "cuda/attention/tiles/mask.cuh"
#include "cuda/attention/tiles/tile_work.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/widen.cuh"

namespace tessera::cuda {

inline constexpr u32 kAllLanes = 0xFFFFFFFF;

/// Whether the low 16 bits are a finite number.
template <Element type>
__device__ __forceinline__ bool is_finite(u32 bits) {
  constexpr u32 infinity = type == Element::bf16 ? 0x7F80 : 0x7C00;
  return (bits & infinity) != infinity;
}

/// Returns two values, or four of 8 bits, with zeros in place of those that are not finite.
template <Element type>
__device__ __forceinline__ u32 finite_of(u32 pair) {
  if constexpr (has_eight_bits(type)) return pair & ~((non_finite_bytes<type>(pair) >> 7) * 0xFFU);
  return (is_finite<type>(pair) ? pair & 0xFFFF : 0) | (is_finite<type>(pair >> 16) ? pair & 0xFFFF0000 : 0);
}

/// Tests many values: passed() tells whether all of them were finite.
template <Element type>
struct FiniteTest {
  u32 sums[4] = {};  // sums of 0 · v, NaN if a v is not finite; with 8 bits flags

  __device__ __forceinline__ void look_at(const u32 (&value)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (has_eight_bits(type)) {
        sums[i] |= non_finite_bytes<type>(value[i]);
      } else {
        sums[i] = ptx::fma_pair<type>(value[i], 0, sums[i]);
      }
    }
  }
  __device__ __forceinline__ bool passed() const {
    constexpr u32 signs = has_eight_bits(type) ? 0 : 0x80008000;
    return ((sums[0] | sums[1] | sums[2] | sums[3]) & ~signs) == 0;
  }
};

/// Replaces values that are not finite by zeros in a tile in shared memory. `threads` threads call this while nobody
/// else uses the tile. Returns whether this thread has replaced a value of a key. Rows from keys() on do not count:
/// they are behind the end of the sequence, and no row sees them.
template <Element type, class Tile, int threads, class Keys>
__device__ __forceinline__ bool replace_values(u32 tile, int thread, Keys keys) {
  constexpr int step_bytes = threads * kChunkBytes;
  constexpr bool whole_steps = Tile::bytes % step_bytes == 0;
  FiniteTest<type> test;
#pragma unroll 2  // registers are short
  for (int step = 0; step < divide_up(Tile::bytes, step_bytes); ++step) {
    if (!whole_steps && (step * threads + thread) * kChunkBytes >= Tile::bytes) break;
    u32 value[4];
    ptx::load_shared_16(value, tile + (step * threads + thread) * kChunkBytes);
    test.look_at(value);
  }
  if (test.passed()) return false;
  const int end = keys();
  bool non_finite = false;
#pragma unroll 1
  for (int at = thread * kChunkBytes; at < Tile::bytes; at += step_bytes) {
    u32 value[4];
    ptx::load_shared_16(value, tile + at);
#pragma unroll
    for (u32& pair : value) {
      const u32 kept = finite_of<type>(pair);
      non_finite |= pair != kept && Tile::row_of(at) < end;
      pair = kept;
    }
    ptx::store_shared_16(tile + at, value);
  }
  return non_finite;
}

/// What replaced values require of a configuration.
template <class Config>
concept ReplacingConfig = EpilogueConfig<Config> && SourceConfig<Config> && MaskConfig<Config> &&
                          ElementMaskConfig<Config> && requires(const Config& c) { int{c.segments}; };

/// The type of V in memory.
template <ReplacingConfig auto C>
constexpr Element value_type() {
  if constexpr (requires { C.v_type(); }) return C.v_type();
  return C.type;
}

/// Adds the values that a block has replaced to the outputs of the rows that see them. That is rare, so the loops are
/// simple. `work`: with dropout a DrawingWork, too; with a list, collect() makes its tiles readable.
template <ReplacingConfig auto C, class Mask, HidingWork Work>
struct ReplacedValues {
  static constexpr Element kType = value_type<C>();

  const AttentionParams& p;
  Work& work;
  const Epilogue<C>& epilogue;
  int warp_row;  // first row of the warp within the block
  int lane;

  /// Each warp calls this for its own rows, after the outputs are stored.
  __device__ __forceinline__ void add_to_outputs() const {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < work.tiles.count(); ++i) {
      if constexpr (requires { work.collect(i); }) work.collect(i);
      const KvTile tile = work.tiles.at(i);
      if (!work.may_hide(tile)) continue;
#pragma unroll 1
      for (int column = lane; column < round_up(C.tile_kv, 32); column += 32) add(tile, column);
    }
  }
  // Adds those of 32 keys; each lane searches the values of one.
  __device__ __forceinline__ void add(const KvTile& tile, int column) const {
    const bool is_key = column < work.keys_of(tile);
    const int key = is_key ? work.tiles.key(tile, column) : 0;
    const char* values = is_key ? values_of(tile.segment, key) : nullptr;
    const bool replaced = is_key && !all_finite(values);
    if (!__any_sync(kAllLanes, replaced)) return;
    const int rows = min(epilogue.used_rows(), warp_row + C.rows_a_warp());
#pragma unroll 1
    for (int row = warp_row; row < rows; ++row) {
      const u32 keys = __ballot_sync(kAllLanes, replaced && sees(row, tile, column, key));
      if (keys != 0) spoil(row, keys, values);
    }
  }
  __device__ __forceinline__ const char* values_of(int tile_segment, int key) const {
    const int segment = C.segments == 2 ? tile_segment : 0;
    const KvParams& kv = p.kv[segment];
    const Extent extent = work.sequence.segment(segment).extent;
    const KvRows<C> rows(kv, kv.v, kv.v_strides, extent, work.block.batch, work.block.kv_head, bytes_of(kType));
    return rows.at(0, key);
  }
  __device__ __forceinline__ bool all_finite(const char* values) const {
    FiniteTest<kType> test;
#pragma unroll 4
    for (int dim = 0; dim < p.dv; dim += elements_of_chunk(kType)) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(values + dim * bytes_of(kType));
      test.look_at({loaded.x, loaded.y, loaded.z, loaded.w});
    }
    return test.passed();
  }

  // Adds the values of some keys that are not finite to the outputs of a row. `keys`: a bit for each lane whose key is
  // one of them; `values`: the address of this lane's key.
  __device__ __forceinline__ void spoil(int row, u32 keys, const char* values) const {
    char* out = epilogue.outputs().writable(row);
#pragma unroll 1
    for (int dim = lane * 2; dim < round_up(p.dv, 64); dim += 64) {
      float sums[2] = {};
#pragma unroll 1
      for (u32 left = keys; left != 0; left &= left - 1) {
        const auto from = __shfl_sync(kAllLanes, reinterpret_cast<u64>(values), __ffs(static_cast<int>(left)) - 1);
        if (dim >= p.dv) continue;
        float value[2];
        load_non_finite(value, reinterpret_cast<const char*>(from), dim);
        sums[0] += value[0];
        sums[1] += value[1];
      }
      if (sums[0] != 0.0F || sums[1] != 0.0F) add_pair(out + dim * bytes_of(C.output), sums);
    }
  }
  /// Loads elements dim and dim + 1 of a key's values, with zeros in place of finite ones.
  static __device__ __forceinline__ void load_non_finite(float (&value)[2], const char* values, int dim) {
    if constexpr (has_eight_bits(kType)) {
      const u32 bytes = reinterpret_cast<const unsigned short*>(values)[dim / 2];
      const u32 upper = __byte_perm(bytes ^ finite_of<kType>(bytes), 0, 0x1404);
      ptx::unpack<Element::fp16>(with_non_finite<Element::fp16, kType>(upper, 0), value[0], value[1]);
    } else {
      const u32 pair = reinterpret_cast<const u32*>(values)[dim / 2];
      ptx::unpack<kType>(pair ^ finite_of<kType>(pair), value[0], value[1]);
    }
  }
  static __device__ __forceinline__ void add_pair(char* outputs, const float (&sums)[2]) {
    if constexpr (C.output == Element::fp32) {
      float2& at = *reinterpret_cast<float2*>(outputs);
      at = make_float2(at.x + sums[0], at.y + sums[1]);
    } else {
      u32& at = *reinterpret_cast<u32*>(outputs);
      float old[2];
      ptx::unpack<C.output>(at, old[0], old[1]);
      at = ptx::pack<C.output>(old[0] + sums[0], old[1] + sums[1]);
    }
  }

  // Whether a row of the block gives a key any weight.
  __device__ __forceinline__ bool sees(int row, const KvTile& tile, int column, int key) const {
    const PackedRow at(work.block.first_row + row, p.group);
    const Segment& segment = work.sequence.segment(tile.segment);
    const KeysOfQueries<C> bounds(p, work.sequence, segment, at.query);
    const Interval visible = bounds.of(at.query);
    if (key < visible.begin || key >= visible.end) return false;
    if constexpr (C.tests_elements()) {
      const ElementMask<C, Mask, Work> mask{p, work};
      const ListReader reader = mask.list();
      ListedKeys listed{reader};
      if (mask.template hides<i64>(at, tile, column, key, listed)) return false;
    }
    if constexpr (C.dropout) {
      return work.dropout.keeps(static_cast<u32>(segment.position) + key,
                                static_cast<u32>(work.sequence.q_position) + at.query, at.head);
    }
    return true;
  }
};

}  // namespace tessera::cuda
