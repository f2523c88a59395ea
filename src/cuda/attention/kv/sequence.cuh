// SPDX-License-Identifier: Apache-2.0
// Lengths and positions of one sequence, read from the bindings and clamped: whatever the metadata contain, no index
// that is computed from them is outside of the tensors.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

__device__ __forceinline__ int clamp(int x, int low, int high) { return min(max(x, low), high); }

/// Clamps an entry of a page table to the `pages` pages of the pool.
__device__ __forceinline__ int page_in_pool(int page, int pages) { return clamp(page, 0, pages - 1); }

/// Returns the number of entries from `first` to the boundary `end`, clamped to 0 … `most`. `end` may be any number, so
/// that end − first could overflow.
__device__ __forceinline__ int entries_until(int end, int first, int most) {
  return clamp(end, first, first + most) - first;
}

/// The place of a sequence in a tensor.
struct Extent {
  int first;     // token of a packed sequence, entry of a CSR table; else 0
  int length;    // rows in use
  int capacity;  // rows that the layout reserves
};

__device__ __forceinline__ Extent find_extent(const int* cu_seqlens, const int* seqused, int batch, int capacity,
                                              int total) {
  Extent extent{0, capacity, capacity};
  if (cu_seqlens != nullptr) {
    extent.first = clamp(cu_seqlens[batch], 0, total);
    extent.capacity = entries_until(cu_seqlens[batch + 1], extent.first, min(capacity, total - extent.first));
    extent.length = extent.capacity;
  }
  if (seqused != nullptr) extent.length = clamp(seqused[batch], 0, extent.length);
  return extent;
}

__device__ __forceinline__ Extent find_keys(const KvParams& kv, int batch) {
  if (kv.page_indptr == nullptr) return find_extent(kv.cu_seqlens, kv.seqused, batch, kv.capacity, kv.total);
  const int begin = clamp(kv.page_indptr[batch], 0, kv.page_indices);
  const int count = entries_until(kv.page_indptr[batch + 1], begin, kv.page_indices - begin);
  const i64 length = count == 0 ? 0 : static_cast<i64>(count - 1) * kv.page_size.value + kv.last_page_len[batch];
  const i64 most = min(static_cast<i64>(count) * kv.page_size.value, static_cast<i64>(kv.capacity));
  return {begin, static_cast<int>(min(max(length, i64{0}), most)), static_cast<int>(most)};
}

/// The keys of one segment of a sequence.
struct Segment {
  Extent extent;
  i64 position;  // of key 0
};

struct Sequence {
  Extent q;
  i64 q_position;  // of query 0
  Segment first, second;

  Sequence() = default;

  __device__ __forceinline__ Sequence(const AttentionParams& p, int batch, int segments) {
    q = find_extent(p.cu_seqlens_q, p.seqused_q, batch, p.seqlen_q, p.total_q);
    first.extent = find_keys(p.kv[0], batch);
    first.position = p.kv[0].offset != nullptr ? p.kv[0].offset[batch] : 0;
    second.extent = {0, 0, 0};
    second.position = first.position + first.extent.length;
    if (segments == 2) {
      second.extent = find_keys(p.kv[1], batch);
      if (p.kv[1].offset != nullptr) second.position = p.kv[1].offset[batch];
    }
    const i64 bottom_right = static_cast<i64>(first.extent.length) + second.extent.length - q.length;
    q_position = p.q_offset != nullptr ? p.q_offset[batch] : p.compressed_stride != 0 ? 0 : bottom_right;
  }

  // Selects field by field, not by array or reference: an address that the compiler does not know would move the whole
  // sequence to local memory.
  __device__ __forceinline__ Segment segment(int index) const {
    const bool is_first = index == 0;
    return {{is_first ? first.extent.first : second.extent.first, is_first ? first.extent.length : second.extent.length,
             is_first ? first.extent.capacity : second.extent.capacity},
            is_first ? first.position : second.position};
  }
};

}  // namespace tessera::cuda
