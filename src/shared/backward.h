// SPDX-License-Identifier: Apache-2.0
// The configuration and the parameters of the backward's kernels.
#pragma once

#include "shared/config.h"
#include "shared/params.h"

namespace tessera::cuda {

/// Which gradients the blocks of a kernel compute.
enum class Gradients : unsigned char {
  queries,  // a block has rows of queries, and the keys stream: dQ
  keys,     // a block has keys, and the rows of all query heads of their head stream: dK and dV
  all,      // likewise, and a block's share of dQ is added to sums in memory
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

/// Everything that changes registers or instructions of the two passes over scores.
struct BwdConfig {
  Gradients of = Gradients::queries;
  Products products = Products::mma_sync;
  Element type = Element::bf16;      // of q, k, v, o and dout
  Element gradient = Element::bf16;  // of dq, dk, dv
  int d = 128;                       // of q and k, padded: a multiple of 32
  int dv = 128;                      // of v and o, likewise
  int tile_q = 64;                   // rows: queries of heads_a_tile heads
  int tile_kv = 32;                  // keys
  int warps = 4;                     // each takes 16 rows of the block's own tile; of `roles` two share them; by
                                     // mma.sync those that find all gradients take 32 keys and some columns
  int stages = 2;                    // tiles of the other side in flight
  bool single_ov = false;            // the other side's V, or dO, has one stage, apart from those of K, or Q
  int segments = 1;                  // sources of keys
  bool apart = false;                // dK and dV by blocks of their own: together they would not fit the registers
  bool roles = false;                // likewise by warpgroups of their own, each of all keys of the block
  bool scale_first = false;          // as FwdConfig's, and so the following
  bool compressed_causal = false;
  bool chunked = false;
  Softcap softcap = Softcap::none;
  bool alibi = false;
  bool sink = false;
  bool dropout = false;
  bool user_score = false;
  bool additive_score = false;  // a user's score without a softcap whose derivative by the product is 1
  bool user_mask = false;
  bool mask_bits = false;  // as FwdConfig's, but a key's bits tell of queries; only where the pass by keys finds all
  Tiles tiles = Tiles::range;  // of a list: those that its bits name (TileBits)
  bool list_elements = false;  // of lists whose blocks and the kernel's tiles cut each other
  bool list_waives = false;    // of other lists with full tiles, where the user's mask is waived
  bool truncates = false;      // the list is not the forward's: rows that had no keys there have no gradients
  bool ordered = false;  // shares of dQ are added in the order of the key tiles, so that all runs give the same bits
  bool splits_rows = false;  // several blocks share a tile of keys, each with some of the rows (RowParts)
  // Query heads of a key head that are packed into a tile's rows: row r is query r / heads_a_tile of head
  // r % heads_a_tile. A power of two; more than 1 where mma.sync finds all gradients and blocks of a list have fewer
  // queries than a tile has rows.
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

  /// What masks, scores, dropout and sources of keys are told: a list is this kernel's own affair.
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

  /// Whether a warpgroup beside those that compute feeds them.
  constexpr bool has_producer() const { return products == Products::wgmma; }
  /// Those that compute.
  constexpr int threads() const { return warps * 32; }
  constexpr int block_threads() const { return threads() + (has_producer() ? 128 : 0); }
  constexpr bool keeps_queries() const { return of == Gradients::queries; }
  constexpr bool has_list() const { return tiles == Tiles::list; }
  /// Whether the pass by keys takes each tile of rows for all query heads of the key head, instead of all rows of one
  /// head after those of another (KeySide::place).
  constexpr bool walks_heads_together() const { return compressed_causal || ordered; }
  /// Whether every other wave of blocks of the pass by keys comes to its rows in ascending order (KeySide::find_walk).
  constexpr bool walks_serpentine() const {
    return compressed_causal && has_producer() && !has_list() && !ordered && !splits_rows;
  }
  constexpr bool adds_dq() const { return of == Gradients::all; }
  /// Whether tiles of keys that many rows meet are shared out among blocks (KeyParts).
  constexpr bool has_parts() const { return adds_dq() && has_list() && !has_producer(); }
  /// Whether several blocks may share a tile of keys, each with some of the rows (RowParts).
  constexpr bool may_split_rows() const { return adds_dq() && has_producer() && !has_list(); }
  /// Queries of a tile of rows, each of which has a row for every head of the tile.
  constexpr int tile_queries() const { return tile_q / heads_a_tile; }
  constexpr int own_rows() const { return keeps_queries() ? tile_q : tile_kv; }
  constexpr int stream_rows() const { return keeps_queries() ? tile_kv : tile_q; }
  /// One row of both operands: Q and dO, or K and V.
  constexpr int row_bytes() const { return (d + dv) * bytes_of(type); }
  /// LSE, δ and, where there are any, weights of the rows that stream.
  constexpr int value_bytes() const { return keeps_queries() ? 0 : (has_weights() ? 3 : 2) * 4 * tile_q; }
  /// Whether rows have weights: a sink's share, or NaN where dropout tells who looks at a row that is not finite.
  constexpr bool has_weights() const { return sink || (dropout && has_producer()); }
  /// Tiles that have LSE and δ in shared memory; the third stage of 128 rows just fits without those of its own.
  constexpr int value_stages() const { return adds_dq() && tile_q >= 128 ? 2 : stages; }
  /// All stages of the other side's tiles.
  constexpr int stream_bytes() const {
    return stream_rows() * (stages * d + (single_ov ? 1 : stages) * dv) * bytes_of(type);
  }
  /// What warps exchange: two tiles of dS, from which dQ is computed, by mma.sync one of P and one of dS, or, of
  /// `roles`, two of P in fp32.
  constexpr int exchange_bytes() const { return (adds_dq() ? bytes_of(type) : roles ? 4 : 0) * 2 * tile_q * tile_kv; }
  /// How warps share what mma.sync finds of all gradients: dK and dV by 32 keys and columns, scores by 32 keys and
  /// rows.
  constexpr int key_warps() const { return tile_kv / 32; }
  constexpr int column_warps() const { return warps / key_warps(); }
  constexpr bool shares_columns() const {
    return d / 16 % column_warps() == 0 && dv / 16 % column_warps() == 0 && tile_q / 16 % column_warps() == 0;
  }
  /// A tile's share of dQ on its way to the sums in memory; by mma.sync it goes there from registers.
  constexpr int query_sum_bytes() const { return adds_dq() && has_producer() ? tile_q * d * 4 : 0; }
  constexpr int smem_bytes() const {
    return FwdConfig::kWorkBytes + own_rows() * row_bytes() + exchange_bytes() + query_sum_bytes() + stream_bytes() +
           value_stages() * value_bytes();
  }
  /// Whether dS needs more than P and dP: the product before the softcap, or a user's score's derivative, which is
  /// computed with the score.
  constexpr bool keeps_chain() const { return softcap != Softcap::none || (user_score && !additive_score); }
  /// Whether the derivative of a user's score is found.
  constexpr bool differentiates() const { return user_score && keeps_chain(); }
  constexpr bool keeps_products() const { return softcap != Softcap::none && !user_score; }
  /// Registers a thread for gradients, scores, their gradients and what the chain rule wants of them, of 255.
  constexpr int accumulators() const {
    if (adds_dq() && !has_producer()) return (d + dv + 2 * tile_q) / column_warps();
    const int gradients = keeps_queries() ? d / 2 : apart || roles ? (d > dv ? d : dv) / 2 : (d + dv) / 2;
    const bool counts_chain = differentiates() || (has_producer() && keeps_products());
    return gradients + stream_rows() + (counts_chain ? stream_rows() / 2 : 0);
  }
  constexpr int blocks() const { return threads() < 256 ? 256 / threads() : 1; }
};

/// The configuration of the kernel in front of the passes.
struct RowValuesConfig {
  Element type = Element::bf16;  // of o and dout
  int dv = 128;                  // padded: a multiple of 32
  int cleared_rows = 0;          // of a tile of QuerySums, which it sets to zeros; 0: there are none, or in order
  bool counts_sums = false;      // of sums in order it sets the counts to zeros
  bool sink = false;
  bool clears = false;    // it sets TileBits, or the counts of RowParts, to zeros
  bool residual = false;  // what rounding o lost is there
  int heads_a_tile = 1;   // of the sums that it clears, as the pass behind it has it

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
  /// Lanes of a row, 8 columns each.
  constexpr int lanes() const { return dv <= 32 ? 4 : dv <= 64 ? 8 : dv <= 128 ? 16 : 32; }
  constexpr int rows() const { return threads() / lanes(); }
};

/// Rows of a list, a warp each, that a block of MarkTiles takes.
inline constexpr int kMarkedRows = 4;

/// Tiles of rows that a part of a tile of keys has at least (KeyParts, RowParts).
inline constexpr int kLeastPart = 32;
/// Threads of the block that finds them.
inline constexpr int kSplitThreads = 1024;

/// Rows of a tile of QuerySums.
inline constexpr int kSumRows = 64;

/// Of a tile of QuerySums, or of dQ of so many rows, the columns of the first of two warpgroups; the second has the
/// others. Half of them, but 64 of 96: panels of 32 columns cannot be halved.
constexpr int sum_columns(int d) { return d % 64 == 0 ? d / 2 : d / 64 * 64; }

/// The configuration of the kernel behind a pass that finds all gradients.
struct QuerySumsConfig {
  Element gradient = Element::bf16;  // of dq
  int d = 128;                       // padded, as the pass has it
  bool ordered = false;              // as the pass is: without a count there are no sums
  bool vectors = true;               // a thread's numbers lie four by four, as TMA adds them (query_sums.cuh)
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

/// Where a pass that finds all gradients adds up dQ in fp32; cleared before the pass unless it is ordered. A tile lies
/// in the order of the accumulators, so that TMA adds a warpgroup's part as one bulk, and by mma.sync an atomicAdd of
/// a warp covers 128 contiguous bytes (backward/query_sums.cuh).
struct QuerySums {
  float* data;
  i64 head_tiles;  // of kSumRows rows, for every heads_a_tile query heads
  int d;           // columns, padded
  // (heads, tiles of rows): of a pass that is `ordered`, how many tiles of keys, from the head's first on, lie up to
  // the one that was added last; zeros before the pass
  int* added;
};

/// What a row of queries brings into every element of its scores' gradient: fp32, (heads, rows of all sequences) each.
/// With P' = exp2(S'·log2(e) − lse) before the sink takes its share, dS' = P' · (weight · dP − delta).
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

/// What configurations with a producer are given: boxes of their own rows, or of a tile of those that stream.
struct BwdTensorMaps {
  TensorMap q, dout;
  TensorMap keys[2], values[2];  // of each source
};

/// What a list leaves to a pass, in its own tiles: for each tile that blocks own a row of bits, one for every tile that
/// may stream by, numbered in order; those of a second source of keys follow the first's, by capacity. Behind a row's
/// bits, of configurations with list_waives, lie as many that name its full tiles. Made on the device from a list of
/// any form.
struct TileBits {
  u32* words;
  i64 batch_stride, head_stride;  // in words; 0 where the list does not tell them apart
  int row_words;                  // of a row, with those of its full tiles and its count
  int waived_words;               // those in front of a row's full tiles; 0: these are not told apart
  int tile_q, tile_kv;            // queries and keys
  int first_tiles;                // of keys of the first source
  bool keys_own;                  // blocks own keys, and rows stream
  bool counts;                    // a row's last word says how many bits of it are set
};

/// One of several blocks that share a tile of keys: each takes a part of the tiles of rows that a list leaves to it.
struct KeyPart {
  int block;  // of the tile of keys, in a grid without parts
  int part;
  int parts;
  int first;  // number of the tile's part 0 among all parts
};

/// How a pass by keys shares out the tiles of keys that a list gives many rows (split-K, where K is the rows), as it
/// does where all rows see the first keys: one block would still be at work when all others have ended. Parts are
/// blocks in front of the others. Each leaves its sums in memory; the last of a tile to do so adds them up, in the
/// order of the parts.
struct KeyParts {
  KeyPart* parts;
  int most;        // parts; 0: no tile has any
  int* count;      // of parts that there are
  int* done;       // of each tile's parts how many have left their sums, at the number of its part 0
  bool* is_split;  // of each tile of keys whether it has parts
  int tiles;       // of keys, of all heads and sequences
  int walks;       // of a block over its tiles of rows: one for as many of its query heads as a tile has
  float* sums;
};

/// How a pass by keys shares out the rows where there are too few tiles of keys for all multiprocessors (split-K, where
/// K is the rows): a part has so many tiles of rows one after another, of all heads, the same ones of every tile of
/// keys. Parts that see none of a tile's keys end at once. Each of the others leaves its sums in memory; the last of a
/// tile to do so adds them up, in the order of the parts.
struct RowParts {
  Divisor key_blocks;  // blocks of a part: one for each tile of keys
  int tiles;           // of rows, of one head, that a part has
  int parts;
  int* done;  // of each tile of keys how many parts have left their sums
  float* sums;
};

struct BwdParams {
  FwdParams forward;  // q, o, lse, keys, masks and scores; the schedule of the rows' pass, whose group is 1
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
  float* dsink_parts;  // (heads, parts), a block's sum each
  int dsink_part_count;
  Divisor kv_heads;
  int first_tiles;  // of keys of the first source, by capacity
  bool accumulates;
  QuerySums query_sums;
  Divisor twice_heads;    // twice the query heads of a key head: i / heads is 2i / that, which is more than 1
  Divisor key_l2_heads;   // key heads of all sequences whose blocks run side by side, so that their rows stay in L2
  Divisor key_l2_blocks;  // of all their keys
  Divisor wave_blocks;    // of the pass by keys that run at once
  TileBits tile_bits[2];  // of configurations with a list: of the pass by rows, unless words is null, and that by keys
  u32* cleared_words;     // of both, or those of RowParts: the kernel in front sets them to zeros
  i64 cleared_count;
  int list_rows;       // query blocks of the list, or key blocks of a transposed one
  KeyParts key_parts;  // of configurations that have parts
  RowParts row_parts;  // of those that split rows
};

/// What a RowValuesConfig with a residual is given; other kernels know nothing of it.
struct ResidualBwdParams : BwdParams {
  const signed char* o_residual;
  Strides o_residual_strides;
};

}  // namespace tessera::cuda
