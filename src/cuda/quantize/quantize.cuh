// SPDX-License-Identifier: Apache-2.0
// Conversion of rows to 8 bits, with their descales (docs/quantization.md). A group of lanes of a warp has a row in
// registers, so that a thread block has several rows at a time. The launch that rounds also finds descales by block and
// by token. It keeps the rows of a short block of tokens in registers; those of a long one it reads twice, the second
// time from L1. Descales by head, and the mean, need launches before it (QuantizePhase).
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/quantize/quantized_row.cuh"
#include "cuda/tile/eight_bits.cuh"
#include "shared/quantize.h"

namespace tessera::cuda {

template <QuantizeConfig C>
struct Quantize {
  using Row = QuantizedRow<C>;
  using Range = EightBits<C.to>;
  static constexpr u32 kAll = 0xffffffffU;
  static constexpr float kLeastDescale = __builtin_bit_cast(float, 1U << 23U);  // 2^-126

  const QuantizeParams& p;
  const RowSigns<C> signs;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % C.lanes;
  const int own = thread / C.lanes;  // index of this thread's row among those of the block

  /// The place of a row.
  struct Place {
    int token;  // of the sequence
    int head;
  };
  /// Rows of a sequence that a thread block takes. Row r is that of head first_head + r mod heads at token r / heads.
  struct Rows {
    int batch;
    Extent extent;
    int first_head;
    Divisor heads;
    int begin;
    int end;

    __device__ __forceinline__ Place place(int row) const {
      const int token = ptx::divide(row, heads);
      return {token, first_head + row - token * static_cast<int>(heads.value)};
    }
  };

  static __device__ __forceinline__ void run(const QuantizeParams& p) {
    if constexpr (C.phase == QuantizePhase::clear) {
      if (threadIdx.x == 0) *p.saturated = 0;
      return;
    }
    const Quantize kernel{p, RowSigns<C>(p, static_cast<int>(threadIdx.x) % C.lanes)};
    const int block = static_cast<int>(blockIdx.x);
    if constexpr (C.phase == QuantizePhase::sum) kernel.add_rows(block);
    if constexpr (C.phase == QuantizePhase::mean) kernel.divide(block);
    if constexpr (C.phase == QuantizePhase::largest) kernel.find_largest(block);
    if constexpr (C.phase == QuantizePhase::round) {
      // The launch before ended with the last rows, which are still in L2. So these go first.
      if constexpr (C.grain == DescaleGrain::head) kernel.round_part(static_cast<int>(gridDim.x) - 1 - block);
      if constexpr (C.grain == DescaleGrain::block) kernel.round_block(block);
      if constexpr (C.grain == DescaleGrain::token) kernel.round_tokens(block);
    }
  }

  __device__ __forceinline__ Extent extent_of(int batch) const {
    return find_extent(p.cu_seqlens, p.seqused, batch, p.seqlen, p.total);
  }

  /// The rows of part `block`, counted over all (batch, key head).
  __device__ __forceinline__ Rows part(int block) const {
    const int key_head = ptx::divide(block, p.parts);
    const int batch = ptx::divide(key_head, p.key_heads);
    const int head = key_head - batch * static_cast<int>(p.key_heads.value);
    const int begin = (block - key_head * static_cast<int>(p.parts.value)) * p.part_rows;
    const Extent extent = extent_of(batch);
    const int group = static_cast<int>(p.group.value);
    return {batch, extent, head * group, p.group, begin, min(begin + p.part_rows, extent.length * group)};
  }

  /// Loaded: the rows that a thread loads before it uses the first of them. kLoaded: their number in a thread block.
  using Loaded = Row[C.ahead()];
  static constexpr int kLoaded = C.rows() * C.ahead();
  __device__ __forceinline__ int row_of(int first, int i) const { return first + i * C.rows() + own; }
  static __device__ __forceinline__ Place place_of(const Rows& rows, int row) {
    return rows.place(row < rows.end ? row : rows.begin);
  }
  __device__ __forceinline__ void load(Loaded& loaded, const Rows& rows, int first) const {
#pragma unroll
    for (int i = 0; i < C.ahead(); ++i) {
      const int row = row_of(first, i);
      loaded[i].load(address(p.x, p.x_strides, bytes_of(C.from), rows, place_of(rows, row)), lane,
                     row < rows.end ? p.d : 0);
    }
  }
  /// Rotates a loaded row and subtracts the mean, as configured. All threads of a warp call this together.
  __device__ __forceinline__ void prepare(Row& row, const Rows& rows, const Place& place) const {
    if constexpr (C.hadamard) row.rotate(signs, p.rotated_chunks, lane);
    if constexpr (C.smooth && C.phase != QuantizePhase::sum) {
      row.subtract(p.mean + rows.batch * p.mean_batch + place.head * p.mean_head, lane, p.d);
    }
  }
  /// Calls use(row, place, valid) for each row, in all threads of a warp together.
  template <class Use>
  __device__ __forceinline__ void for_each(const Rows& rows, Use use) const {
#pragma unroll 1
    for (int first = rows.begin; first < rows.end; first += kLoaded) {
      Loaded loaded;
      load(loaded, rows, first);
#pragma unroll
      for (int i = 0; i < C.ahead(); ++i) {
        const int row = row_of(first, i);
        const Place place = place_of(rows, row);
        prepare(loaded[i], rows, place);
        use(loaded[i], place, row < rows.end);
      }
    }
  }

  static __device__ __forceinline__ const char* address(const void* tensor, const Strides& strides, int bytes,
                                                        const Rows& rows, const Place& place) {
    const i64 at =
        rows.batch * strides.batch + (i64{rows.extent.first} + place.token) * strides.row + place.head * strides.head;
    return static_cast<const char*>(tensor) + at * bytes;
  }

  // Sums each column of a part: first over each thread's rows, then over the threads that have the same columns.
  __device__ __forceinline__ void add_rows(int block) const {
    __shared__ float sums[C.rows()][C.lanes * C.steps * C.width];
    Row sum;
    sum.clear();
    for_each(part(block), [&](const Row& row, const Place& /*place*/, bool valid) {
      if (valid) sum.add_finite(row);
    });
#pragma unroll
    for (int step = 0; step < C.steps; ++step) {
#pragma unroll
      for (int i = 0; i < C.width; ++i) sums[own][(step * C.lanes + lane) * C.width + i] = sum.at[step][i];
    }
    __syncthreads();
    for (int column = thread; column < p.d; column += C.threads()) {
      float all = 0.0F;
#pragma unroll 4
      for (int row = 0; row < C.rows(); ++row) all += sums[row][column];
      p.sums[static_cast<i64>(block) * p.d + column] = all;
    }
  }

  // Computes the mean of (batch, head) number `block`.
  __device__ __forceinline__ void divide(int block) const {
    const int batch = ptx::divide(block, p.heads);
    const int head = block - batch * static_cast<int>(p.heads.value);
    const int length = extent_of(batch).length;
    for (int column = thread; column < p.d; column += C.threads()) {
      float all = 0.0F;
      for (u32 i = 0; i < p.parts.value; ++i)
        all += p.sums[(static_cast<i64>(block) * p.parts.value + i) * p.d + column];
      p.mean[batch * p.mean_batch + head * p.mean_head + column] = length > 0 ? all / static_cast<float>(length) : 0.0F;
    }
  }

  __device__ __forceinline__ float largest_of(const Rows& rows) const {
    float largest = 0.0F;
    for_each(rows,
             [&](const Row& row, const Place& /*place*/, bool /*valid*/) { largest = fmaxf(largest, row.largest()); });
    return largest;
  }
  /// The maximum over all threads of the block, returned to all of them.
  __device__ __forceinline__ float largest_of_block(float largest) const {
    __shared__ float warps[C.threads() / 32];
    largest = largest_of_lanes<32>(largest);
    if (thread % 32 == 0) warps[thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C.threads() / 32; ++i) largest = fmaxf(largest, warps[i]);
    return largest;
  }
  template <int lanes>
  static __device__ __forceinline__ float largest_of_lanes(float largest) {
#pragma unroll
    for (int other = 1; other < lanes; other *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, other));
    return largest;
  }

  __device__ __forceinline__ void find_largest(int block) const {
    const float largest = largest_of_block(largest_of(part(block)));
    if (thread == 0) p.magnitudes[block] = largest;
  }

  static __device__ __forceinline__ float descale_of(float largest) {
    return largest > 0.0F ? fmaxf(largest / Range::largest, kLeastDescale) : 1.0F;
  }
  /// The address of the descale of block of tokens, or token, `index`.
  __device__ __forceinline__ float* descale_at(int batch, int head, int index) const {
    return p.descales + (p.packed_descales ? 0 : batch * p.descale_batch) + head * p.descale_head + index;
  }

  __device__ __forceinline__ void round_part(int block) const {
    const Rows rows = part(block);
    const int key_head = ptx::divide(block, p.parts);
    float* at = p.descales + rows.batch * p.descale_batch +
                (key_head - rows.batch * static_cast<int>(p.key_heads.value)) * p.descale_head;
    float descale;
    if constexpr (C.given) {
      descale = *at;
    } else {
      float largest = 0.0F;
      const float* parts = p.magnitudes + static_cast<i64>(key_head) * p.parts.value;
      for (int i = thread % 32; i < static_cast<int>(p.parts.value); i += 32) largest = fmaxf(largest, parts[i]);
      descale = descale_of(largest_of_lanes<32>(largest));
      if (rows.begin == 0 && thread == 0) *at = descale;
    }
    round_rows(rows, descale);
  }

  __device__ __forceinline__ void round_block(int block) const {
    const int unit = ptx::divide(block, p.heads);
    const int head = block - unit * static_cast<int>(p.heads.value);
    const int batch = ptx::divide(unit, p.blocks);
    const int index = unit - batch * static_cast<int>(p.blocks.value);
    const Extent extent = extent_of(batch);
    const int begin = index * p.block;
    if (begin >= extent.length) return;
    const Rows rows{batch, extent, head, Divisor(1), begin, begin + min(p.block, extent.length - begin)};
    float* at = descale_at(batch, head, index);
    if constexpr (C.given) {
      round_rows(rows, *at);
      return;
    }
    if (rows.end - rows.begin <= kLoaded) {
      round_kept(rows, at);
      return;
    }
    const float descale = descale_of(largest_of_block(largest_of(rows)));
    if (thread == 0) *at = descale;
    round_rows(rows, descale);
  }
  // Rounds a block of tokens that is short enough to be kept in registers.
  __device__ __forceinline__ void round_kept(const Rows& rows, float* descale_at) const {
    Loaded kept;
    load(kept, rows, rows.begin);
    float largest = 0.0F;
#pragma unroll
    for (int i = 0; i < C.ahead(); ++i) {
      prepare(kept[i], rows, place_of(rows, row_of(rows.begin, i)));
      largest = fmaxf(largest, kept[i].largest());
    }
    const float descale = descale_of(largest_of_block(largest));
    if (thread == 0) *descale_at = descale;
    int out_of_range = 0;
#pragma unroll
    for (int i = 0; i < C.ahead(); ++i) {
      const int row = row_of(rows.begin, i);
      if (row < rows.end) out_of_range += store(kept[i], rows, rows.place(row), descale);
    }
    count_saturated(out_of_range);
  }

  __device__ __forceinline__ void round_tokens(int block) const {
    const int batch = ptx::divide(block, p.blocks);
    const Extent extent = extent_of(batch);
    constexpr int count = C.rows() * C.ahead();
    const int begin = (block - batch * static_cast<int>(p.blocks.value)) * count;
    const Rows rows{batch,   extent, 0,
                    p.heads, begin,  min(begin + count, extent.length * static_cast<int>(p.heads.value))};
    int out_of_range = 0;
    for_each(rows, [&](const Row& row, const Place& place, bool valid) {
      float* at = descale_at(batch, place.head, place.token + (p.packed_descales ? extent.first : 0));
      float descale = 1.0F;
      if constexpr (C.given) {
        if (valid) descale = *at;
      } else {
        descale = descale_of(largest_of_lanes<C.lanes>(row.largest()));
        if (valid && lane == 0) *at = descale;
      }
      if (valid) out_of_range += store(row, rows, place, descale);
    });
    count_saturated(out_of_range);
  }

  __device__ __forceinline__ void round_rows(const Rows& rows, float descale) const {
    int out_of_range = 0;
    for_each(rows, [&](const Row& row, const Place& place, bool valid) {
      if (valid) out_of_range += store(row, rows, place, descale);
    });
    count_saturated(out_of_range);
  }
  __device__ __forceinline__ int store(const Row& row, const Rows& rows, const Place& place, float descale) const {
    const char* to = address(p.quantized, p.quantized_strides, 1, rows, place);
    return row.template store<C.to>(const_cast<char*>(to), lane, p.d, descale);
  }
  __device__ __forceinline__ void count_saturated(int out_of_range) const {
    if constexpr (C.counts) {
      const int of_warp = __reduce_add_sync(kAll, out_of_range);
      if (thread % 32 == 0 && of_warp > 0) atomicAdd(p.saturated, static_cast<u64>(of_warp));
    }
  }
};

}  // namespace tessera::cuda
