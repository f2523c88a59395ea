// SPDX-License-Identifier: Apache-2.0
// What a kernel is given at run time. Strides in elements, pointers to device memory. Lengths, windows, layouts, sinks
// and splits are here; of them the configuration knows at most that sequences are packed.
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
  int box_rows;       // of the loader tma: rows that lie together, a divisor of what a tile takes together
};

enum class ListForm : unsigned char { indices, bitmask, transposed };
enum class ListHeads : unsigned char { kv, q };  // a list for all heads has a head stride of 0

/// One of the two lists, strides of (batch, head, block); 0 where the list does not tell them apart.
struct TileTable {
  const int* counts;    // index lists
  const void* entries;  // int32, or the uint32 words of a bitmask
  i64 count_strides[3];
  i64 entry_strides[3];
  int capacity;  // entries of a row
};

/// Which keys a user's mask hides, in blocks of kMaskBlock queries by as many keys of a segment: what configurations
/// with mask_bits are given. A query has 4 words for each key block. Bit 2n + i of word t tells of key 8n + 2t + i: as
/// bits of a thread lie (HiddenBits in scores/element_mask.cuh). A backward's lie the other way: a key has 4 words for
/// each block of queries (HiddenElements in backward/transposed_scores.cuh). Only blocks that the list has as partial
/// are there.
struct MaskBits {
  u32* words;
  i64 batch_stride;
  int row_words;     // of a query, or a key
  int second_block;  // first key block of the second segment
};
inline constexpr int kMaskBlock = 128;

/// What configurations with Tiles::list are given.
struct ListParams {
  ListForm form;
  ListHeads heads;
  bool has_full;
  TileTable partial;
  TileTable full;
  Divisor block_q, block_kv;
  int key_blocks;
  int second_block;   // first key block of the second segment
  int second_blocks;  // its key blocks
  int words;          // of a bitmask's row
  MaskBits mask_bits;
};

/// What configurations with `dropout` are given.
struct DropoutParams {
  u32 threshold;         // draws of 16 bits below it are kept
  float scale;           // of what is kept: 65536 / threshold
  u64 seed, offset;      // unless bound as tensors:
  const u64* seed_at;    // (1)
  const u64* offset_at;  // (1)
  i64 first_head_batch;  // batch offset · heads + head offset
  i64 heads;             // query heads of a sequence
};

/// What configurations with `chunked` are given.
struct KeyChunks {
  WideDivisor size;
  i64 above;  // a multiple of the size that is added to positions, so that none is negative
};

/// A tensor that the text of a score or mask reads. The last dimension is contiguous.
struct ExtraParams {
  const void* data;
  i64 sizes[4];
  i64 strides[3];  // elements
};

/// With FwdConfig::whole_rows heads and pages are one dimension of a tensor map: how far from one to the next.
struct PageSteps {
  int head, page;
};

/// What kernels whose loader is tma are given: for each source boxes of its box_rows and a panel's columns, with
/// FwdConfig::whole_rows of all columns; by wgmma boxes of 64 packed rows of Q, where these are boxes.
struct TensorMaps {
  TensorMap keys[2];
  TensorMap values[2];
  TensorMap queries;
  int has_queries;
  PageSteps key_steps, value_steps;  // with FwdConfig::whole_rows
};

/// The rows that the blocks of a grid of one dimension take: L2 group after L2 group, whose keys and values fit
/// L2 together, of head_batches (a head of a sequence and split); in a group the last rows of every head_batch come
/// first, then those before them. dv_parts blocks for each lie side by
/// side. With FwdConfig::varlen `count`, `tiles` and `l2_group` are of sequences as long as the longest may be, and
/// each has its own instead (tiles/tile_scheduler.cuh).
struct TileSchedule {
  int count;             // of all
  int tiles;             // of rows, of a head_batch
  Divisor l2_group;      // row tiles of an L2 group
  Divisor head_batches;  // of an L2 group
  Divisor heads;         // head_batches of a sequence and split
};

/// Where blocks that stay on their multiprocessor draw the numbers of further row tiles: see tiles/tile_counter.cuh.
struct TileCounterParams {
  u64* drawn;  // numbers; in the workspace; null: no block takes more than the tile of its own number
  u64* left;   // blocks that draw no more; likewise
  u64 tag;     // of the plan, 1 to 2^40 - 1
};

/// What a forward keeps of a row for the masses of its tiles: a key's probability is exp2(S'·log2(e) − origin) / sum.
/// Unlike the LSE neither is rounded away from the exponentials that went into it.
struct RowSum {
  float origin;
  float sum;  // 0: no keys
};

/// cap · tanh(score / cap) as scores/score.cuh computes it. Finite for every cap: 0 · ∞ would be NaN.
struct SoftcapParams {
  float cap;
  float exponent;   // 2 · log2(e) / cap
  float factor;     // of scores: a constant of the polynomials / cap
  float saturated;  // 8 · cap; the tanh of scores as large is 1

  SoftcapParams() = default;
  constexpr explicit SoftcapParams(float softcap)
      : cap(softcap),
        exponent(finite(2.88539008F / softcap)),
        factor(finite(0.146691397F / softcap)),
        saturated(finite(8.0F * softcap)) {}

 private:
  static constexpr float finite(float x) { return x < 3.40282347e38F ? x : 3.40282347e38F; }
};

/// What every pass over the same scores shares: where q, k, v, o and the LSE lie, lengths, masks, what changes scores,
/// and which block computes which rows. Policies take this and nothing else.
struct AttentionParams {
  bool finds_early;  // row tiles follow from these parameters alone: no lengths, positions, lists or seeds in memory
  TileSchedule schedule;
  TileCounterParams tile_counter;
  const void* q;
  void* o;     // a forward writes o and the LSE, what follows it reads them
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

  i64 batch_offset, head_offset;  // where callables read batch and head
  float scale;
  SoftcapParams softcap;  // of configurations with `softcap`
  const float* slopes;    // ALiBi: (heads) or (batch, heads)
  i64 slopes_batch, slopes_head;
  const float* sinks;  // (heads)
  i64 sinks_stride;

  DropoutParams dropout;
  ListParams list;

  // Inclusive and signed; left = most negative end when unbounded: see kUnbounded.
  i64 window_left, window_right;
  i64 compressed_length, compressed_stride;  // of configurations with `compressed_causal`
  KeyChunks chunk;

  Divisor splits;  // parts of the keys that blocks of their own walk

  ExtraParams extras[4];  // of the score's text, then of the mask's
};

struct FwdParams : AttentionParams {
  RowSum* row_sums;  // null: not wanted, as with splits
  Strides row_sum_strides;
  // With splits o and lse are partial results, split by split, each normalised by its own sum and without the sink;
  // `combine` merges them.
  i64 o_split;
  i64 lse_split;
};

/// What configurations that keep the residual of O are given. Others know nothing of it: their parameters, and so their
/// instructions, stay as they were.
struct ResidualFwdParams : FwdParams {
  signed char* o_residual;
  Strides o_residual_strides;
};

/// What configurations with has_descales() are given: descales by key head, (batch, key heads); with `descales_keys`
/// those of q (batch, heads, blocks) and of k (batch or pages, key heads, blocks), blocks of `tokens`.
struct DescaleParams {
  const float* q;  // of configurations whose q has 8 bits
  const float* k;
  const float* v;  // of configurations whose v has
  i64 q_batch, q_head;
  i64 k_batch, k_head;
  i64 v_batch, v_head;
  Divisor tokens;
  bool packed_q, packed_k;  // by token of packed sequences: counted from the first sequence's
  const float* mean;        // of k (batch, key heads, d), with `smooth`
  i64 mean_batch, mean_head;
};

/// A skip state, which a forward moves on a step in place (docs/skip-state.md). Strides of (batch, head, block); rows
/// of tiles are contiguous.
struct SkipParams {
  u32* bits;  // FwdParams::list's, with the strides of its entries
  unsigned char* codes;
  i64 code_strides[3];
  float* lse;  // of the step before, then of this one
  Strides lse_strides;
  const float* thresholds;  // (heads)
  i64 threshold_stride;
  const int* step;       // of the rule `threshold`: odd ones walk from the last key to the first
  const u32* must_do;    // (words), or null
  const u32* must_skip;  // likewise
  int growth;
  // In the workspace. By wgmma (block, 2, warp, key block): what the warps' rows say of the tiles of the row tile in
  // work and of the one before. By mma.sync of the rule `threshold` (batch, head, query block, word): the next list.
  float* partials;
  u32* next;
  int heads;
  int query_blocks;
};

/// What configurations with `skip` are given.
struct SkipFwdParams : ResidualFwdParams {
  SkipParams skip;
};

/// Beyond what two positions, of 2^60 at most, and a side of a window, of as much, come to; sums with it still fit.
inline constexpr i64 kUnbounded = i64{1} << 62;

}  // namespace tessera::cuda
