// SPDX-License-Identifier: Apache-2.0
// Reads a tile list in any of its forms. Counts and entries come from the device and are clamped or tested where they
// are read, so that no address is outside of the tensors whatever they contain.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "shared/params.h"

namespace tessera::cuda {

enum class ListClass : unsigned char { none, partial, full };

/// The sorted entries of one row of an index list.
struct ListRow {
  const int* entries;
  int count;

  /// Index of the first entry at or above `value`.
  __device__ __forceinline__ int lower_bound(int value) const {
    int low = 0;
    for (int left = count; left > 0;) {
      const int half = left / 2;
      const bool below = entries[low + half] < value;
      low = below ? low + half + 1 : low;
      left = below ? left - half - 1 : half;
    }
    return low;
  }
  /// Whether there is an entry from `first` to `last`.
  __device__ __forceinline__ bool any(int first, int last) const {
    const int at = lower_bound(first);
    return at < count && entries[at] <= last;
  }
};

/// The key blocks that are computed, of a word of a skip state's list: docs/skip-state.md, equation 1.
__device__ __forceinline__ u32 with_musts(const SkipParams& skip, u32 listed, int word) {
  if (skip.must_do != nullptr) listed |= skip.must_do[word];
  return skip.must_skip != nullptr ? listed & ~skip.must_skip[word] : listed;
}

/// The lists of one (batch, list head).
struct ListReader {
  const ListParams& p;
  int batch;
  int head;

  /// `query_head`: the first query head of the block; `kv_head`: its key head.
  __device__ __forceinline__ ListReader(const ListParams& params, int b, int query_head, int kv_head)
      : p(params), batch(b), head(params.heads == ListHeads::q ? query_head : kv_head) {}

  /// A row of an index list: `block` is a query block, or a key block of the transposed form.
  __device__ __forceinline__ ListRow row(const TileTable& table, int block) const {
    const i64* c = table.count_strides;
    const i64* e = table.entry_strides;
    const int count = table.counts[batch * c[0] + head * c[1] + block * c[2]];
    return {static_cast<const int*>(table.entries) + batch * e[0] + head * e[1] + block * e[2],
            clamp(count, 0, table.capacity)};
  }
  /// A word of a bitmask: key blocks 32·word and the 31 after it.
  __device__ __forceinline__ u32 bits(const TileTable& table, int query_block, int word) const {
    const i64* e = table.entry_strides;
    return static_cast<const u32*>(table.entries)[batch * e[0] + head * e[1] + query_block * e[2] + word];
  }

  /// Both blocks must exist.
  __device__ __forceinline__ bool contains(const TileTable& table, int query_block, int key_block) const {
    if (p.form == ListForm::bitmask) return (bits(table, query_block, key_block / 32) >> (key_block % 32) & 1) != 0;
    if (p.form == ListForm::indices) return row(table, query_block).any(key_block, key_block);
    return row(table, key_block).any(query_block, query_block);
  }
  __device__ __forceinline__ ListClass find(int query_block, int key_block) const {
    if (p.has_full && contains(p.full, query_block, key_block)) return ListClass::full;
    return contains(p.partial, query_block, key_block) ? ListClass::partial : ListClass::none;
  }
};

}  // namespace tessera::cuda
