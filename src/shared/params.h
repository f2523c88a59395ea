// SPDX-License-Identifier: Apache-2.0
// The parameters of kernels. Strides are in elements, pointers are to device memory. Lengths, windows, layouts, sinks
// and splits are parameters; of these the configuration contains at most that sequences are packed.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

struct Strides {
  i64 batch;  // 0 for varlen; between pages for paged
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
  int box_rows;       // for the TMA: rows of a box, a divisor of the adjacent rows that a tile takes
};

enum class ListForm : unsigned char { indices, bitmask, transposed };
enum class ListHeads : unsigned char { kv, q };  // a list for all heads has a head stride of 0

/// The partial or the full list. Strides are of (batch, head, block), and 0 if the list does not depend on that
/// dimension.
struct TileTable {
  const int* counts;    // index lists
  const void* entries;  // int32, or the uint32 words of a bitmask
  i64 count_strides[3];
  i64 entry_strides[3];
  int capacity;  // entries of a row
};

/// The keys that a user's mask hides, for configurations with mask_bits: in blocks of kMaskBlock queries by kMaskBlock
/// keys of a segment. A query has 4 words for each key block. Bit 2n + i of word t is that of key 8n + 2t + i, which is
/// the order of a thread's elements (HiddenBits in scores/element_mask.cuh). In a backward it is the reverse: a key has
/// 4 words for each block of queries (HiddenElements in backward/transposed_scores.cuh). Only blocks that are partial
/// in the list have bits.
struct MaskBits {
  u32* words;
  i64 batch_stride;
  int row_words;     // of a query, or a key
  int second_block;  // first key block of the second segment
};
inline constexpr int kMaskBlock = 128;

/// The parameters of configurations with Tiles::list.
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

/// The parameters of configurations with `dropout`.
struct DropoutParams {
  u32 threshold;         // elements with a 16-bit draw below it are kept
  float scale;           // of what is kept: 65536 / threshold
  u64 seed, offset;      // unless bound as tensors:
  const u64* seed_at;    // (1)
  const u64* offset_at;  // (1)
  i64 first_head_batch;  // batch offset · heads + head offset
  i64 heads;             // query heads of a sequence
};

/// The parameters of configurations with `chunked`.
struct KeyChunks {
  WideDivisor size;
  i64 above;  // a multiple of the size, added to positions so that none is negative
};

/// A tensor that a user's score or mask reads. The last dimension is contiguous.
struct ExtraParams {
  const void* data;
  i64 sizes[4];
  i64 strides[3];  // elements
};

/// With FwdConfig::whole_rows, heads and pages are one dimension of a tensor map: its steps from one head, and from one
/// page, to the next.
struct PageSteps {
  int head, page;
};

/// The parameters of kernels that use the TMA. For each source, boxes have box_rows rows and the columns of one panel,
/// or with FwdConfig::whole_rows all columns. With wgmma, boxes of Q have 64 packed rows, if such boxes exist.
struct TensorMaps {
  TensorMap keys[2];
  TensorMap values[2];
  TensorMap queries;
  int has_queries;
  PageSteps key_steps, value_steps;  // with FwdConfig::whole_rows
};

/// The order in which the blocks of a one-dimensional grid take row tiles. A head_batch is a head of a sequence and
/// split. The head_batches of an L2 group have keys and values that fit L2 together. L2 groups follow each other; in a
/// group the last row tiles of every head_batch come first, then those before them. The dv_parts blocks of a row tile
/// are neighbours. With FwdConfig::varlen, `count`, `tiles` and `l2_group` are those of sequences as long as the
/// longest may be, and each sequence has its own instead (tiles/tile_scheduler.cuh).
struct TileSchedule {
  int count;             // row tiles of all head_batches
  int tiles;             // row tiles of a head_batch
  Divisor l2_group;      // row tiles of an L2 group
  Divisor head_batches;  // of an L2 group
  Divisor heads;         // head_batches of a sequence and split
};

/// The counters from which persistent blocks draw further row tiles: see tiles/tile_counter.cuh.
struct TileCounterParams {
  u64* drawn;  // tiles that were drawn; in the workspace; null: a block takes only the tile of its own index
  u64* left;   // blocks that draw no more; likewise
  u64 tag;     // of the plan, 1 to 2^40 - 1
};

/// What a forward keeps of a row for the masses of its tiles. A key's probability is exp2(S'·log2(e) − origin) / sum.
/// Unlike the LSE, both are the exact numbers that belong to the forward's exponentials.
struct RowSum {
  float origin;
  float sum;  // 0: no keys
};

/// The constants of cap · tanh(score / cap) as scores/score.cuh computes it. For every cap they are finite, because 0 ·
/// ∞ would be NaN.
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

/// What all passes over the same scores share: the tensors q, k, v, o and LSE, lengths, masks, what changes scores, and
/// the rows of each block. Policies take only this.
struct AttentionParams {
  bool finds_early;  // row tiles depend on these parameters only: no lengths, positions, lists or seeds are in memory
  TileSchedule schedule;
  TileCounterParams tile_counter;
  const void* q;
  void* o;     // a forward writes o and the LSE, later kernels read them
  float* lse;  // null: not wanted
  Strides q_strides;
  Strides o_strides;
  Strides lse_strides;  // of (batch, row, head)
  int batch;
  Divisor heads_a_kv;  // query heads that share a key head
  Divisor group;       // of these, how many are packed into the rows of a tile: all, or 1
  int d, dv;           // as the tensors have them
  int seqlen_q;        // longest sequence
  int total_q;         // varlen
  const int* cu_seqlens_q;
  const int* seqused_q;
  const i64* q_offset;
  KvParams kv[2];

  i64 batch_offset, head_offset;  // added to the batch and the head that callables get
  float scale;
  SoftcapParams softcap;  // of configurations with `softcap`
  const float* slopes;    // ALiBi: (heads) or (batch, heads)
  i64 slopes_batch, slopes_head;
  const float* sinks;  // (heads)
  i64 sinks_stride;

  DropoutParams dropout;
  ListParams list;

  // Inclusive and signed. A side without a limit is kUnbounded.
  i64 window_left, window_right;
  i64 compressed_length, compressed_stride;  // of configurations with `compressed_causal`
  KeyChunks chunk;

  Divisor splits;  // parts of the keys, each with its own blocks

  ExtraParams extras[4];  // those of the user's score, then those of the mask
};

struct FwdParams : AttentionParams {
  RowSum* row_sums;  // null: not wanted, as with splits
  Strides row_sum_strides;
  // With splits, o and lse are partial results, split by split. Each is normalised by its own sum, without the sink;
  // `combine` merges them.
  i64 o_split;
  i64 lse_split;
};

/// The parameters of configurations that store the residual of O. Others do not have these fields, so that their
/// parameters and thus their instructions are the same as without the feature.
struct ResidualFwdParams : FwdParams {
  signed char* o_residual;
  Strides o_residual_strides;
};

/// The parameters of configurations with has_descales(): descales by key head, (batch, key heads). With
/// `descales_keys`, those of q are (batch, heads, blocks) and those of k (batch or pages, key heads, blocks), with
/// blocks of `tokens`.
struct DescaleParams {
  const float* q;  // of configurations whose q has 8 bits
  const float* k;
  const float* v;  // of configurations whose v has 8 bits
  i64 q_batch, q_head;
  i64 k_batch, k_head;
  i64 v_batch, v_head;
  Divisor tokens;
  bool packed_q, packed_k;  // by token of packed sequences: counted from the first sequence's first
  const float* mean;        // of k (batch, key heads, d), with `smooth`
  i64 mean_batch, mean_head;
};

/// A skip state, which a forward advances by a step in place (docs/skip-state.md). Strides are of (batch, head, block);
/// entries of a row are contiguous.
struct SkipParams {
  u32* bits;  // the bitmask of FwdParams::list, with the strides of its entries
  unsigned char* codes;
  i64 code_strides[3];
  float* lse;  // of the previous step, then of this one
  Strides lse_strides;
  const float* thresholds;  // (heads)
  i64 threshold_stride;
  const int* step;       // with rule `threshold`: odd steps walk from the last key to the first
  const u32* must_do;    // (words), or null
  const u32* must_skip;  // likewise
  int growth;
  // In the workspace. With wgmma, `partials` (thread block, 2, warp, key block): what the warps' rows measure of the
  // tiles in the current row tile and in the previous one. With mma.sync and rule `threshold`, `next` (batch, head,
  // query block, word): the next list.
  float* partials;
  u32* next;
  int heads;
  int query_blocks;
};

/// The parameters of configurations with `skip`.
struct SkipFwdParams : ResidualFwdParams {
  SkipParams skip;
};

/// A side of a window without a limit. It exceeds the sum of two positions, of 2^60 at most, and a side of a window, of
/// 2^60 at most; sums with it still fit 64 bits.
inline constexpr i64 kUnbounded = i64{1} << 62;

}  // namespace tessera::cuda
