// SPDX-License-Identifier: Apache-2.0
// Metadata mode `report`: finds on the device what host-side validation refuses, and writes it to a status word. One
// thread block runs before the kernel that clamps the same values. The result does not depend on how threads are
// scheduled.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "shared/metadata.h"

namespace tessera::cuda {

struct MetadataCheck {
  static constexpr int kThreads = 512;
  static constexpr int kNone = 0x7fffffff;

  const MetadataParams& p;
  int& first;  // the smallest status, in shared memory

  static __device__ __forceinline__ void run(const MetadataParams& p) {
    __shared__ int first;
    if (threadIdx.x == 0) first = kNone;
    __syncthreads();
    const MetadataCheck check{p, first};
    for (int b = static_cast<int>(threadIdx.x); b < p.batch; b += kThreads) check.sequence(b);
    for (int s = 0; s < p.sources; ++s) check.pages(p.source[s]);
    for (const MetadataList& list : p.list) check.entries(list);
    __syncthreads();
    if (threadIdx.x == 0 && first != kNone && *p.status == 0) *p.status = first;
  }

  __device__ __forceinline__ void require(bool holds, int sequence, int slot) const {
    if (!holds) atomicMin(&first, status_of(sequence, slot));
  }

  static __device__ __forceinline__ i64 run_length(const int* ends, int b) {
    return static_cast<i64>(ends[b + 1]) - ends[b];
  }

  // Boundaries must begin at 0, not decrease, and not exceed `total`; an interval has at most `longest` elements.
  __device__ __forceinline__ void boundaries(const int* ends, int b, i64 total, i64 longest, int slot) const {
    const i64 begin = ends[b];
    const i64 end = ends[b + 1];
    require((b > 0 || begin == 0) && end >= begin && end <= total && end - begin <= longest, b, slot);
  }

  __device__ __forceinline__ void sequence(int b) const {
    if (p.cu_seqlens_q != nullptr) boundaries(p.cu_seqlens_q, b, p.total_q, p.seqlen_q, p.cu_seqlens_q_slot);
    if (p.seqused_q != nullptr) {
      const i64 most = p.cu_seqlens_q != nullptr ? run_length(p.cu_seqlens_q, b) : p.seqlen_q;
      require(p.seqused_q[b] >= 0 && p.seqused_q[b] <= most, b, p.seqused_q_slot);
    }
    for (int s = 0; s < p.sources; ++s) keys(p.source[s], b);
    for (const MetadataSlots& states : p.states) {
      if (states.slots != nullptr) require(state_of(states, b) < p.state_count, b, states.slot);  // negative: none
    }
    if (p.cursors == nullptr || (p.states[0].slots != nullptr && state_of(p.states[0], b) < 0)) return;
    require(p.cursors[b] >= 0 && p.cursors[b] <= p.cursor_limit, b, p.cursor_slot);
  }

  static __device__ __forceinline__ i64 state_of(const MetadataSlots& states, int b) {
    return states.is_long ? static_cast<const i64*>(states.slots)[b] : static_cast<const int*>(states.slots)[b];
  }

  // The number of new tokens, after clamping.
  __device__ __forceinline__ int fresh(int b) const {
    return p.appends ? find_extent(p.cu_seqlens_q, p.seqused_q, b, p.seqlen_q, p.total_q).length : 0;
  }

  __device__ __forceinline__ void keys(const MetadataSource& source, int b) const {
    const KvParams& kv = source.kv;
    if (kv.cu_seqlens != nullptr) boundaries(kv.cu_seqlens, b, kv.total, kv.capacity, source.cu_seqlens_slot);
    if (kv.seqused != nullptr) {
      const i64 most = kv.cu_seqlens != nullptr ? run_length(kv.cu_seqlens, b) : kv.capacity;
      require(kv.seqused[b] >= 0 && static_cast<i64>(kv.seqused[b]) + fresh(b) <= most, b, source.seqused_slot);
    }
    if (kv.page_indptr == nullptr) return;
    boundaries(kv.page_indptr, b, kv.page_indices, kv.page_indices, source.indptr_slot);
    const i64 count = run_length(kv.page_indptr, b);
    const i64 page_size = kv.page_size.value;
    if (p.appends) {
      require(static_cast<i64>(kv.seqused[b]) + fresh(b) <= count * page_size, b, source.indptr_slot);
      return;
    }
    const i64 last = kv.last_page_len[b];
    const bool fits =
        count <= 0 ? last == 0 : last >= 1 && last <= page_size && (count - 1) * page_size + last <= kv.capacity;
    require(fits, b, source.last_slot);
  }

  // Checks page ids: of a 2-D table those that the lengths reach, of CSR all.
  __device__ __forceinline__ void pages(const MetadataSource& source) const {
    const KvParams& kv = source.kv;
    if (kv.page_table == nullptr) return;
    for (int b = 0; b < p.batch; ++b) {
      const int* row = kv.page_table + b * kv.page_table_stride;
      int count = 0;
      if (kv.page_indptr != nullptr) {
        const int begin = clamp(kv.page_indptr[b], 0, kv.page_indices);
        row = kv.page_table + begin;
        count = entries_until(kv.page_indptr[b + 1], begin, kv.page_indices - begin);
      } else {
        const int length = clamp(clamp(kv.seqused[b], 0, kv.capacity) + fresh(b), 0, kv.capacity);
        count = min(divide_up(length, static_cast<int>(kv.page_size.value)), kv.page_indices);
      }
      for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
        require(row[i] >= 0 && row[i] < kv.pages, b, source.page_slot);
      }
    }
  }

  // Each warp checks a row at a time.
  __device__ __forceinline__ void entries(const MetadataList& list) const {
    if (list.counts == nullptr) return;
    const i64 rows = static_cast<i64>(list.batch) * list.heads * list.lines;
    for (i64 row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
      const auto line = static_cast<int>(row % list.lines);
      const auto head = static_cast<int>(row / list.lines % list.heads);
      const auto b = static_cast<int>(row / list.lines / list.heads);
      const i64* at = list.counts_strides;
      const int count = list.counts[b * at[0] + head * at[1] + line * at[2]];
      require(count >= 0 && count <= list.capacity, b, list.counts_slot);
      at = list.indices_strides;
      const int* indices = list.indices + b * at[0] + head * at[1] + line * at[2];
      for (int i = static_cast<int>(threadIdx.x) % 32; i < min(count, list.capacity); i += 32) {
        const bool sorted = i == 0 || indices[i] > indices[i - 1];
        require(indices[i] >= 0 && indices[i] < list.limit && sorted, b, list.indices_slot);
      }
    }
  }
};

}  // namespace tessera::cuda
