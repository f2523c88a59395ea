// SPDX-License-Identifier: Apache-2.0
// What a kernel is given at run time. Strides in elements, pointers to device memory. Lengths, windows, layouts, sinks
// and splits are here, never in the configuration.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

struct Strides {
  i64 batch;  // 0 for varlen; of a page for paged
  i64 row;
  i64 head;
};

/// A source of keys and values. Exactly the pointers that its layout needs are not null.
struct KvParams {
  const void* k;
  const void* v;
  Strides k_strides;
  Strides v_strides;
  int capacity;              // longest sequence; lengths are clamped to it
  int total;                 // varlen: capacity in tokens
  const int* cu_seqlens;     // (b + 1)
  const int* seqused;        // (b)
  const int* page_table;     // (b, columns), or the page indices of CSR
  i64 page_table_stride;     // 0 for CSR
  const int* page_indptr;    // CSR: (b + 1)
  const int* last_page_len;  // CSR: (b)
  Divisor page_size;
  int pages;
  int page_indices;   // CSR: entries of the table; 2-D: columns
  const i64* offset;  // (b), or null for the default
};

struct FwdParams {
  const void* q;
  void* o;
  float* lse;  // null: not wanted
  Strides q_strides;
  Strides o_strides;
  Strides lse_strides;  // of (batch, row, head)
  int batch;
  Divisor heads_a_kv;  // query heads that share a key head
  Divisor group;       // of them packed into the rows of a tile: all, or 1
  int d, dv;           // as the tensors have them
  int seqlen_q;        // longest sequence
  int total_q;         // varlen
  const int* cu_seqlens_q;
  const int* seqused_q;
  const i64* q_offset;
  KvParams kv[2];

  float scale;
  float softcap, inverse_softcap;
  const float* slopes;  // ALiBi: (heads) or (batch, heads)
  i64 slopes_batch, slopes_head;
  const float* sinks;  // (heads)
  i64 sinks_stride;

  // Inclusive and signed; left = most negative end when unbounded: see kUnbounded.
  i64 band_left, band_right;
  i64 affine_length, affine_stride;  // of configurations with `affine`

  // Parts of the keys that blocks of their own walk. With more than one, o and lse are partial results, split by split,
  // each normalised by its own sum and without the sink; `combine` merges them.
  Divisor splits;
  i64 o_split;
  i64 lse_split;
};

inline constexpr i64 kUnbounded = i64{1} << 40;

}  // namespace tessera::cuda
