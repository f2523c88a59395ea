// SPDX-License-Identifier: Apache-2.0
// The configurations and parameters of the backward kernels (docs/kernels.md, section 12).
#pragma once

#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// Which gradients the blocks of a kernel compute.
enum class Gradients : unsigned char {
  queries,  // row pass: a block owns query rows and streams keys; it computes dQ
  keys,     // key pass: a block owns keys and streams the rows of their query heads; it computes dK and dV
  all,      // one-pass scheme: the key pass, which also adds its share of dQ to sums in memory
};

constexpr Spelling spelling(Gradients gradients) {
  switch (gradients) {
    case Gradients::queries:
      return {"Gradients", "queries"};
    case Gradients::keys:
      return {"Gradients", "keys"};
    case Gradients::all:
      return {"Gradients", "all"};
  }
  return {};
}

/// Everything that changes registers or instructions of a row pass or key pass.
struct BwdConfig {
  Gradients of = Gradients::queries;
  Products products = Products::mma_sync;
  Element type = Element::bf16;      // of q, k, v, o and dout
  Element gradient = Element::bf16;  // of dq, dk, dv
  int d = 128;                       // head dim of q and k, padded to a multiple of 32
  int dv = 128;                      // head dim of v and o, likewise
  int tile_q = 64;                   // rows of a query tile, from heads_a_tile heads
  int tile_kv = 32;                  // keys of a key tile
  int warps = 4;                     // compute warps. Each has 16 rows of the block's own tile (with `roles` two warps
                                     // share them); with mma.sync and Gradients::all, 32 keys and some columns
  int stages = 2;                    // pipeline stages of the streamed tiles
  bool single_ov = false;            // streamed V (row pass) or dO (key pass) has one stage of its own
  int segments = 1;                  // sources of keys and values
  bool apart = false;                // separate blocks compute dK and dV, which together would not fit the registers
  bool roles = false;                // likewise, separate warpgroups of a block; each has all of its keys
  bool scale_first = false;          // as in FwdConfig, like the following fields that both have
  bool compressed_causal = false;
  bool chunked = false;
  Softcap softcap = Softcap::none;
  bool alibi = false;
  bool sink = false;
  bool dropout = false;
  bool user_score = false;
  bool additive_score = false;  // the user's score has derivative 1 with respect to scale · q·k; no softcap
  bool user_mask = false;
  bool mask_bits = false;      // as in FwdConfig, but each key has bits for queries; only with Gradients::all
  Tiles tiles = Tiles::range;  // list: the tiles whose bits are set in TileBits
  bool list_elements = false;  // list blocks and kernel tiles are not aligned: each element is looked up
  bool list_waives = false;    // the list has full tiles, in which the user's mask is not evaluated
  bool truncates = false;      // the list is not the forward's: rows that had no keys there get no gradients
  bool ordered = false;  // shares of dQ are added in the order of the key tiles, so that all runs give the same bits
  bool splits_rows = false;  // several blocks share a tile of keys, each with some of the rows (RowParts)
  // Query heads that are packed into the rows of a tile: row r is query r / heads_a_tile of head r % heads_a_tile. It
  // is a power of two, and more than 1 only with mma.sync, Gradients::all and list blocks that have fewer queries than
  // a tile has rows.
  int heads_a_tile = 1;

  static constexpr const char* type_name() { return "BwdConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct.
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("of", c.of);
    visit("products", c.products);
    visit("type", c.type);
    visit("gradient", c.gradient);
    visit("d", c.d);
    visit("dv", c.dv);
    visit("tile_q", c.tile_q);
    visit("tile_kv", c.tile_kv);
    visit("warps", c.warps);
    visit("stages", c.stages);
    visit("single_ov", c.single_ov);
    visit("segments", c.segments);
    visit("apart", c.apart);
    visit("roles", c.roles);
    visit("scale_first", c.scale_first);
    visit("compressed_causal", c.compressed_causal);
    visit("chunked", c.chunked);
    visit("softcap", c.softcap);
    visit("alibi", c.alibi);
    visit("sink", c.sink);
    visit("dropout", c.dropout);
    visit("user_score", c.user_score);
    visit("additive_score", c.additive_score);
    visit("user_mask", c.user_mask);
    visit("mask_bits", c.mask_bits);
    visit("tiles", c.tiles);
    visit("list_elements", c.list_elements);
    visit("list_waives", c.list_waives);
    visit("truncates", c.truncates);
    visit("ordered", c.ordered);
    visit("splits_rows", c.splits_rows);
    visit("heads_a_tile", c.heads_a_tile);
  }

  constexpr bool operator==(const BwdConfig&) const = default;

  /// The FwdConfig of code shared with the forward: masks, scores, dropout, sources of keys. It has no list.
  constexpr FwdConfig as_forward() const {
    FwdConfig c;
    c.type = type;
    c.output = type;
    c.d = d;
    c.dv = dv;
    c.tile_q = tile_q;
    c.tile_kv = tile_kv;
    c.warps = warps;
    c.stages = stages;
    c.loader = has_producer() ? Loader::tma : Loader::cp_async;
    c.products = products;
    c.segments = segments;
    c.granule = tile_kv;
    c.scale_first = scale_first;
    c.compressed_causal = compressed_causal;
    c.chunked = chunked;
    c.softcap = softcap;
    c.alibi = alibi;
    c.dropout = dropout;
    c.user_score = user_score;
    c.user_mask = user_mask;
    c.mask_bits = mask_bits;
    c.list_elements = list_elements;
    c.list_waives = list_waives;
    return c;
  }

  /// Whether the block has a producer warpgroup beside its compute warps.
  constexpr bool has_producer() const { return products == Products::wgmma; }
  /// Compute threads, without the producer.
  constexpr int threads() const { return warps * 32; }
  constexpr int block_threads() const { return threads() + (has_producer() ? 128 : 0); }
  constexpr bool keeps_queries() const { return of == Gradients::queries; }
  constexpr bool has_list() const { return tiles == Tiles::list; }
  /// Whether the key pass by wgmma visits a tile of rows for all query heads before it goes to the next tile, instead
  /// of all tiles of one head before the next head (KeySide::place).
  constexpr bool walks_heads_together() const { return compressed_causal || ordered; }
  /// Whether every other wave of blocks of the key pass visits its rows in ascending order (KeySide::find_walk).
  constexpr bool walks_serpentine() const {
    return compressed_causal && has_producer() && !has_list() && !ordered && !splits_rows;
  }
  constexpr bool adds_dq() const { return of == Gradients::all; }
  /// Whether several blocks share a tile of keys for which the list has many tiles of rows (KeyParts).
  constexpr bool has_parts() const { return adds_dq() && has_list() && !has_producer(); }
  /// Whether several blocks may share a tile of keys, each with some of the rows (RowParts).
  constexpr bool may_split_rows() const { return adds_dq() && has_producer() && !has_list(); }
  /// Queries of a tile; each has heads_a_tile rows.
  constexpr int tile_queries() const { return tile_q / heads_a_tile; }
  constexpr int own_rows() const { return keeps_queries() ? tile_q : tile_kv; }
  constexpr int stream_rows() const { return keeps_queries() ? tile_kv : tile_q; }
  /// Bytes of one row of Q and dO, or of K and V.
  constexpr int row_bytes() const { return (d + dv) * bytes_of(type); }
  /// Bytes of the LSE, δ and, with has_weights(), weights of a streamed tile of rows.
  constexpr int value_bytes() const { return keeps_queries() ? 0 : (has_weights() ? 3 : 2) * 4 * tile_q; }
  /// Whether rows have a weight: that of RowValues with a sink; with dropout 1, or NaN for a row that is not finite.
  constexpr bool has_weights() const { return sink || (dropout && has_producer()); }
  /// Stages of the row values. Tiles of 128 rows have two, so that a third stage of Q and dO fits shared memory.
  constexpr int value_stages() const { return adds_dq() && tile_q >= 128 ? 2 : stages; }
  /// Bytes of all stages of the streamed tiles.
  constexpr int stream_bytes() const {
    return stream_rows() * (stages * d + (single_ov ? 1 : stages) * dv) * bytes_of(type);
  }
  /// Bytes of the tiles that warps exchange: with adds_dq() two of dS by wgmma, one of P and one of dS by mma.sync;
  /// with `roles` two of P in fp32.
  constexpr int exchange_bytes() const { return (adds_dq() ? bytes_of(type) : roles ? 4 : 0) * 2 * tile_q * tile_kv; }
  /// With mma.sync and Gradients::all, key_warps() by column_warps() warps share the products: scores by 32 keys and
  /// rows, dK and dV by 32 keys and columns.
  constexpr int key_warps() const { return tile_kv / 32; }
  constexpr int column_warps() const { return warps / key_warps(); }
  constexpr bool shares_columns() const {
    return d / 16 % column_warps() == 0 && dv / 16 % column_warps() == 0 && tile_q / 16 % column_warps() == 0;
  }
  /// Bytes of the buffer from which the TMA adds a tile's share of dQ; with mma.sync threads add it from registers.
  constexpr int query_sum_bytes() const { return adds_dq() && has_producer() ? tile_q * d * 4 : 0; }
  constexpr int smem_bytes() const {
    return FwdConfig::kWorkBytes + own_rows() * row_bytes() + exchange_bytes() + query_sum_bytes() + stream_bytes() +
           value_stages() * value_bytes();
  }
  /// Whether the chain rule needs a value besides P and dP: q·k before the softcap, or the derivative of the user's
  /// score, which is computed with the score.
  constexpr bool keeps_chain() const { return softcap != Softcap::none || (user_score && !additive_score); }
  /// Whether the derivative of the user's score is computed.
  constexpr bool differentiates() const { return user_score && keeps_chain(); }
  constexpr bool keeps_products() const { return softcap != Softcap::none && !user_score; }
  /// Accumulator registers of a thread, of its 255: for the gradients, S, dP and the values of the chain rule.
  constexpr int accumulators() const {
    if (adds_dq() && !has_producer()) return (d + dv + 2 * tile_q) / column_warps();
    const int gradients = keeps_queries() ? d / 2 : apart || roles ? (d > dv ? d : dv) / 2 : (d + dv) / 2;
    const bool counts_chain = differentiates() || (has_producer() && keeps_products());
    return gradients + stream_rows() + (counts_chain ? stream_rows() / 2 : 0);
  }
  constexpr int blocks() const { return threads() < 256 ? 256 / threads() : 1; }
};

/// The configuration of the kernel that runs before the passes (FindRowValues).
struct RowValuesConfig {
  Element type = Element::bf16;  // of o and dout
  int dv = 128;                  // padded: a multiple of 32
  int cleared_rows = 0;          // rows of a QuerySums tile, which it clears; 0: no sums, or ordered ones
  bool counts_sums = false;      // it clears the counts of ordered sums (QuerySums::added)
  bool sink = false;
  bool clears = false;    // it clears TileBits, or the counts of RowParts
  bool residual = false;  // o has a residual: what its rounding lost
  int heads_a_tile = 1;   // of the key pass: the layout of the sums that it clears

  static constexpr const char* type_name() { return "RowValuesConfig"; }
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("dv", c.dv);
    visit("cleared_rows", c.cleared_rows);
    visit("counts_sums", c.counts_sums);
    visit("sink", c.sink);
    visit("clears", c.clears);
    visit("residual", c.residual);
    visit("heads_a_tile", c.heads_a_tile);
  }

  constexpr bool operator==(const RowValuesConfig&) const = default;

  static constexpr int threads() { return 256; }
  /// Lanes that share a row, 8 columns each.
  constexpr int lanes() const { return dv <= 32 ? 4 : dv <= 64 ? 8 : dv <= 128 ? 16 : 32; }
  constexpr int rows() const { return threads() / lanes(); }
};

/// Rows of the list that a block of MarkTiles takes, one for each warp.
inline constexpr int kMarkedRows = 4;

/// The least number of tiles of rows in a part (KeyParts, RowParts).
inline constexpr int kLeastPart = 32;
/// Threads of the block of SplitKeys.
inline constexpr int kSplitThreads = 1024;

/// Rows of a tile of QuerySums.
inline constexpr int kSumRows = 64;

/// Columns of a QuerySums tile that the first of two warpgroups has; the second has the rest. They are half of the
/// columns, but 64 of 96, because panels of 32 columns are not cut.
constexpr int sum_columns(int d) { return d % 64 == 0 ? d / 2 : d / 64 * 64; }

/// The configuration of the kernel that runs after a pass with Gradients::all (StoreQuerySums).
struct QuerySumsConfig {
  Element gradient = Element::bf16;  // of dq
  int d = 128;                       // padded, as the pass has it
  bool ordered = false;              // as in the pass; a tile whose count is 0 has no sums
  bool vectors = true;               // four floats of a thread are adjacent, as the TMA adds them (query_sums.cuh)
  int heads_a_tile = 1;              // as the pass has it

  static constexpr const char* type_name() { return "QuerySumsConfig"; }
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("gradient", c.gradient);
    visit("d", c.d);
    visit("ordered", c.ordered);
    visit("vectors", c.vectors);
    visit("heads_a_tile", c.heads_a_tile);
  }

  constexpr bool operator==(const QuerySumsConfig&) const = default;

  static constexpr int threads() { return 256; }
};

/// The fp32 sums of dQ, to which Gradients::all adds. They are cleared before the pass unless it is `ordered`. A tile
/// is stored in accumulator order, so that one bulk reduction of the TMA adds the part of a warpgroup, and with
/// mma.sync an atomicAdd of a warp covers 128 contiguous bytes (backward/query_sums.cuh).
struct QuerySums {
  float* data;
  i64 head_tiles;  // tiles of kSumRows rows, per heads_a_tile query heads
  int d;           // columns, padded
  // With `ordered`, (heads, tiles of rows): 1 + the index of the key tile whose share was added last; 0 before the
  // pass.
  int* added;
};

/// What a query row contributes to the gradients of its scores: fp32 arrays (heads, rows of all sequences). With the
/// softmax without the sink, P' = exp2(S'·log2(e) − lse), dS' = P' · (weight · dP − delta).
struct RowValues {
  float* lse;     // LSE · log2(e); +∞ for rows without keys
  float* delta;   // weight · Σ dO·O − dLSE
  float* weight;  // exp(LSE − LSE with the sink); of configurations with `sink`
  i64 rows;       // of a head
};

/// A gradient of keys or values of one source.
struct KeyGradient {
  void* data;
  Strides strides;
};

/// Tensor maps for configurations with a producer. A box has the rows of an own or of a streamed tile.
struct BwdTensorMaps {
  TensorMap q, dout;
  TensorMap keys[2], values[2];  // of each source
};

/// A tile list as bits, in the tiles of a pass: for each tile that a block owns, a row of bits, one for each tile that
/// it may stream, in order. Tiles of the second source of keys are numbered after the first's, which are counted by
/// capacity. With list_waives, each row has a second set of bits, which marks its full tiles. MarkTiles makes the bits
/// on the device from any form of list.
struct TileBits {
  u32* words;
  i64 batch_stride, head_stride;  // in words; 0 if all batches or heads share the list
  int row_words;                  // of a row, including those of its full tiles and its count
  int waived_words;               // offset in a row of the bits of full tiles; 0: there are none
  int tile_q, tile_kv;            // queries and keys
  int first_tiles;                // key tiles of the first source
  bool keys_own;                  // blocks own tiles of keys and stream rows, not the reverse
  bool counts;                    // the last word of a row is the number of its tiles
};

/// The part of one of several blocks that share a tile of keys: some of the tiles of rows.
struct KeyPart {
  int block;  // the block of the tile of keys in a grid without parts
  int part;
  int parts;
  int first;  // index of the tile's part 0 among the parts of all tiles
};

/// Split-K for tiles of keys with many tiles of rows in a list, where K counts the rows: if all rows see the first
/// keys, one block would still run when all others have ended. Parts take the first blocks of the grid. Each writes its
/// sums to memory; the last block of a tile to do so adds them up in the order of the parts.
struct KeyParts {
  KeyPart* parts;
  int most;        // capacity of `parts`; 0: no tile is split
  int* count;      // the actual number of parts
  int* done;       // at KeyPart::first: how many parts of the tile have written their sums
  bool* is_split;  // whether a tile of keys has parts
  int tiles;       // tiles of keys of all heads and sequences
  int walks;       // how often a block goes over its tiles of rows: once per heads_a_tile query heads
  float* sums;
};

/// Split-K for fewer tiles of keys than multiprocessors, where K counts the rows: a part is a range of tiles of rows,
/// of all heads, and is the same for every tile of keys. A part whose rows see none of a block's keys ends at once.
/// Each other part writes its sums to memory; the last block of a tile of keys to do so adds them up in the order of
/// the parts.
struct RowParts {
  Divisor key_blocks;  // blocks of a part: one for each tile of keys
  int tiles;           // tiles of rows in a part, of one head
  int parts;
  int* done;  // for each tile of keys: how many parts have written their sums
  float* sums;
};

struct BwdParams {
  FwdParams forward;  // q, o, lse, keys, masks and scores; the schedule is that of the row pass, with a group of 1
  const void* dout;
  Strides dout_strides;
  const float* dlse;  // null: none
  Strides dlse_strides;
  RowValues values;
  void* dq;
  Strides dq_strides;
  KeyGradient dk[2], dv[2];
  float* dsink;
  i64 dsink_stride;
  float* dsink_parts;  // (heads, parts): the sum of each block
  int dsink_part_count;
  Divisor kv_heads;
  int first_tiles;  // key tiles of the first source, counted by capacity
  bool accumulates;
  QuerySums query_sums;
  Divisor twice_heads;    // 2 · query heads of a key head: i / heads = 2i / twice_heads, a divisor that is more than 1
  Divisor key_l2_heads;   // key heads of an L2 group, whose blocks run side by side so that their rows stay in L2
  Divisor key_l2_blocks;  // blocks of an L2 group
  Divisor wave_blocks;    // blocks of the key pass that run at once
  TileBits tile_bits[2];  // with a list: for the row pass (words is null if there is none) and the key pass
  u32* cleared_words;     // words of both, or RowParts::done; FindRowValues clears them
  i64 cleared_count;
  int list_rows;       // query blocks of the list, or key blocks of a transposed one
  KeyParts key_parts;  // with BwdConfig::has_parts()
  RowParts row_parts;  // with BwdConfig::splits_rows
};

/// The parameters of FindRowValues with a residual. Other kernels read only the BwdParams.
struct ResidualBwdParams : BwdParams {
  const signed char* o_residual;
  Strides o_residual_strides;
};

}  // namespace tessera::cuda
