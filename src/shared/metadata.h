// SPDX-License-Identifier: Apache-2.0
// The parameters of the kernel that checks lengths, page tables and tile lists. A slot is the value of its
// tessera::Slot.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

struct MetadataSource {
  KvParams kv;
  int cu_seqlens_slot, seqused_slot, page_slot, indptr_slot, last_slot;
};

/// Index lists (batch or 1, heads, lines). A list has sorted unique entries from 0 to below `limit`.
struct MetadataList {
  const int* counts;   // null: no such list
  const int* indices;  // (…, capacity)
  i64 counts_strides[3];
  i64 indices_strides[3];
  int batch, heads, lines;
  int capacity;
  int limit;
  int counts_slot, indices_slot;
};

/// The states of sequences in a pool: an index for each sequence, below MetadataParams::state_count; negative: none.
struct MetadataSlots {
  const void* slots;  // null: none
  bool is_long;       // int64, else int32
  int slot;
};

struct MetadataParams {
  int batch;
  int seqlen_q, total_q;
  const int* cu_seqlens_q;
  const int* seqused_q;
  int cu_seqlens_q_slot, seqused_q_slot;
  MetadataSource source[2];
  int sources;
  bool appends;             // seqused has the lengths before the new tokens are appended
  MetadataList list[2];     // partial and full
  MetadataSlots states[2];  // sources and destinations
  i64 state_count;
  const int* cursors;  // of rings beside the states; null: none
  int cursor_limit;    // the largest that is valid
  int cursor_slot;
  int* status;  // written if it holds 0
};

/// A violation as a positive int32. Of several the smallest is reported, which is one of the first sequence.
inline constexpr int kStatusSlotBits = 8;
constexpr int status_of(int sequence, int slot) {
  const int last = (1 << (30 - kStatusSlotBits)) - 1;
  return (sequence < last ? sequence : last) << kStatusSlotBits | (slot + 1);
}

}  // namespace tessera::cuda
