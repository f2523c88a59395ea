// SPDX-License-Identifier: Apache-2.0
// Copies new keys and values to their places in a cache, dense or paged, with optional rotary embedding (Su et al.
// 2021, RoFormer) of the new keys, and of the queries at the same positions. A thread block takes all heads of one
// token. A token for which the cache has no room is not written; page ids are clamped.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/append.h"

namespace tessera::cuda {

template <AppendConfig C>
struct KvAppend {
  const AppendParams& p;
  int position;  // of the token in its sequence

  static __device__ __forceinline__ void run(const AppendParams& p) {
    const int row = static_cast<int>(blockIdx.x);
    const int batch = static_cast<int>(blockIdx.y);
    const Extent tokens = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
    if (row >= tokens.length) return;
    const int before = p.kv.seqused[batch];
    // There is no room either if the length is negative. The comparison cannot overflow.
    const bool has_room = before >= 0 && before < p.kv.capacity - row;
    const KvAppend token{p, has_room ? before + row : 0};
    const i64 new_row = tokens.first + row;
    if (has_room) token.append(batch, new_row);
    if (p.q == nullptr) return;
    token.template move<C.q, true>(p.q, batch * p.q_strides.batch + new_row * p.q_strides.row, p.q_strides.head,
                                   p.q_rotated, batch * p.q_rotated_strides.batch + new_row * p.q_rotated_strides.row,
                                   p.q_rotated_strides.head, p.heads_q, p.d);
  }

  __device__ __forceinline__ void append(int batch, i64 new_row) const {
    const i64 page = page_of(batch);
    if (page < 0) return;
    const bool paged = p.kv.page_table != nullptr;
    const int row = paged ? position % static_cast<int>(p.kv.page_size.value) : position;
    const Strides& k = p.kv.k_strides;
    const Strides& v = p.kv.v_strides;
    move<C.k, true>(p.k_new, batch * p.k_new_strides.batch + new_row * p.k_new_strides.row, p.k_new_strides.head,
                    const_cast<void*>(p.kv.k), page * k.batch + row * k.row, k.head, p.heads_kv, p.d);
    move<C.v, false>(p.v_new, batch * p.v_new_strides.batch + new_row * p.v_new_strides.row, p.v_new_strides.head,
                     const_cast<void*>(p.kv.v), page * v.batch + row * v.row, v.head, p.heads_kv, p.dv);
  }

  /// The page of `position`, or the sequence of a dense cache; −1 if the table has no such entry.
  __device__ __forceinline__ i64 page_of(int batch) const {
    if (p.kv.page_table == nullptr) return batch;
    const int entry = position / static_cast<int>(p.kv.page_size.value);
    const int* table = p.kv.page_table + batch * p.kv.page_table_stride;
    int entries = p.kv.page_indices;
    if (p.kv.page_indptr != nullptr) {
      const int begin = clamp(p.kv.page_indptr[batch], 0, entries);
      entries = entries_until(p.kv.page_indptr[batch + 1], begin, entries - begin);
      table += begin;
    }
    if (entry >= entries) return -1;
    return page_in_pool(table[entry], p.kv.pages);
  }

  /// Copies one row of each head. Offsets and strides are in elements.
  template <Element type, bool rotates>
  __device__ __forceinline__ void move(const void* from, i64 from_at, i64 from_head, void* to, i64 to_at, i64 to_head,
                                       int heads, int columns) const {
    constexpr int size = bytes_of(type);
    constexpr bool rotated = rotates && C.rotation != Rotation::none && !has_eight_bits(type);
    const int rotary = rotated ? p.rotary_dim : 0;
    const int pair_steps = rotary / (2 * C.width);
    const int steps = pair_steps + (columns - rotary) / C.width;  // of a row
    for (int i = static_cast<int>(threadIdx.x); i < heads * steps; i += C.threads()) {
      const int head = i / steps;
      const int step = i - head * steps;
      const char* source = static_cast<const char*>(from) + (from_at + head * from_head) * size;
      char* target = static_cast<char*>(to) + (to_at + head * to_head) * size;
      if constexpr (rotated) {
        if (step < pair_steps) {
          rotate<type>(source, target, step * C.width);
          continue;
        }
      }
      const int column = (rotary + (step - pair_steps) * C.width) * size;
      copy_elements<type, C.width>(source + column, target + column);
    }
  }

  /// Rotates `width` pairs from `pair` on.
  template <Element type>
  __device__ __forceinline__ void rotate(const char* source, char* target, int pair) const {
    constexpr int size = bytes_of(type);
    constexpr bool half = C.rotation == Rotation::half;
    const int first = (half ? pair : 2 * pair) * size;
    const int second = half ? first + p.rotary_dim / 2 * size : first + C.width * size;
    RowVector<type, C.width> row[2];
    row[0].load(source + first);
    row[1].load(source + second);
    const i64 angle = clamp(position, 0, p.positions - 1);
#pragma unroll
    for (int i = 0; i < C.width; ++i) {
      float& x = half ? row[0].at[i] : row[2 * i / C.width].at[2 * i % C.width];
      float& y = half ? row[1].at[i] : row[(2 * i + 1) / C.width].at[(2 * i + 1) % C.width];
      const float cosine = angle_of(p.cosines, p.cosines_fp32, angle * p.cosine_stride + pair + i);
      const float sine = angle_of(p.sines, p.sines_fp32, angle * p.sine_stride + pair + i);
      const float before = x;
      x = before * cosine - y * sine;
      y = y * cosine + before * sine;
    }
    row[0].store(target + first);
    row[1].store(target + second);
  }

  __device__ __forceinline__ float angle_of(const void* table, bool is_fp32, i64 at) const {
    RowVector<Element::fp32, 1> wide;
    RowVector<C.k, 1> narrow;
    if (is_fp32) {
      wide.load(static_cast<const float*>(table) + at);
      return wide.at[0];
    }
    narrow.load(static_cast<const char*>(table) + at * bytes_of(C.k));
    return narrow.at[0];
  }
};

}  // namespace tessera::cuda
