// SPDX-License-Identifier: Apache-2.0
// The one configuration value of a forward kernel: everything that changes registers or instructions, and nothing else.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

/// Where rows of K and V live.
enum class Source : unsigned char {
  strided,  // dense and varlen
  paged,    // a 2-D table or CSR
  mixed,    // of two segments one is paged and one is not; each tells at run time
};

constexpr Spelling spelling(Source source) {
  switch (source) {
    case Source::strided:
      return {"Source", "strided"};
    case Source::paged:
      return {"Source", "paged"};
    case Source::mixed:
      return {"Source", "mixed"};
  }
  return {};
}

/// Which tiles of keys a block of queries walks.
enum class Tiles : unsigned char {
  range,  // all between two bounds
  list,   // those of a tile list
};

constexpr Spelling spelling(Tiles tiles) {
  switch (tiles) {
    case Tiles::range:
      return {"Tiles", "range"};
    case Tiles::list:
      return {"Tiles", "list"};
  }
  return {};
}

/// By which rule a list moves on to the next step's (docs/skip-state.md).
enum class Skip : unsigned char {
  none,       // it stays as it is
  mass,       // by the rows' masses in its tiles, relative to the LSE of the step before
  threshold,  // by how far the tiles raise the rows' maxima
};

constexpr Spelling spelling(Skip skip) {
  switch (skip) {
    case Skip::none:
      return {"Skip", "none"};
    case Skip::mass:
      return {"Skip", "mass"};
    case Skip::threshold:
      return {"Skip", "threshold"};
  }
  return {};
}

/// How tiles come into shared memory.
enum class Loader : unsigned char {
  cp_async,  // 16 bytes a thread, by all threads
  // Boxes by TMA: SM90 and newer; of mma.sync strided sources only. By wgmma a warp beside those that
  // compute asks for them, by mma.sync one of those that compute.
  tma,
  tma_warp,  // of mma.sync: a warp beside those that compute asks for the boxes
};

constexpr Spelling spelling(Loader loader) {
  switch (loader) {
    case Loader::cp_async:
      return {"Loader", "cp_async"};
    case Loader::tma:
      return {"Loader", "tma"};
    case Loader::tma_warp:
      return {"Loader", "tma_warp"};
  }
  return {};
}

/// By which instructions products are computed, and what of them a warp takes.
enum class Products : unsigned char {
  mma_sync,     // by a warp, which has rows of its own: SM80 and newer
  wgmma,        // by a warpgroup of four, asynchronously, beside a warpgroup that asks for copies: SM90
  mma_by_keys,  // by a warp, which has all rows of the block and tiles of keys of its own: few rows, SM80 and newer
};

constexpr Spelling spelling(Products products) {
  switch (products) {
    case Products::mma_sync:
      return {"Products", "mma_sync"};
    case Products::wgmma:
      return {"Products", "wgmma"};
    case Products::mma_by_keys:
      return {"Products", "mma_by_keys"};
  }
  return {};
}

/// How scores are capped (scores/score.cuh).
enum class Softcap : unsigned char {
  none,
  exponential,  // by e^2u: faster, off by a rounding of the cap
  rational,     // off by roundings of the score
};

constexpr Spelling spelling(Softcap softcap) {
  switch (softcap) {
    case Softcap::none:
      return {"Softcap", "none"};
    case Softcap::exponential:
      return {"Softcap", "exponential"};
    case Softcap::rational:
      return {"Softcap", "rational"};
  }
  return {};
}

struct FwdConfig {
  Element type = Element::bf16;    // of q, k, v; of P
  Element output = Element::bf16;  // of o; fp32 too for the partials of splits
  int d = 128;                     // of q and k, padded: a multiple of 32
  int dv = 128;                    // of the columns of v and o that a block takes, padded: a multiple of 32
  int dv_parts = 1;                // blocks that share the columns of v and o; each computes all scores
  int tile_q = 128;                // rows of queries, heads of a group packed
  int tile_kv = 64;                // keys
  int warps = 4;                   // each takes rows_a_warp() rows, a multiple of 16
  int stages = 1;                  // tiles of K and V in flight
  bool ping_pong = true;           // by wgmma: groups of 64 rows take turns
  int q_kept = 0;  // columns of Q, a multiple of 16, that stay in registers; others are read for every tile of keys
  Source source = Source::strided;
  Loader loader = Loader::cp_async;
  Products products = Products::mma_sync;
  Tiles tiles = Tiles::range;
  int segments = 1;  // sources of keys
  // Consecutive keys that a list keeps or skips together: tile_kv or a divisor of it from 16 on. A tile of a list
  // gathers tile_kv / granule such pieces.
  int granule = 64;
  bool list_elements = false;  // of lists whose blocks and the kernel's tiles cut each other: tested key by key
  bool list_waives = false;    // of lists with full tiles, where the user's mask is waived
  bool varlen = false;         // by wgmma: sequences lie packed; each has the row tiles of its own length
  bool whole_rows = false;     // by wgmma: boxes bring all columns of a page's rows (tile/swizzle.cuh)
  bool trusts = false;         // page ids and key blocks of lists are not tested; wrong ones address what is not theirs
  // Scores are scaled before their maxima are taken: softcap, ALiBi and users' scores unless linear_score, scales that
  // are not positive.
  bool scale_first = false;
  bool compressed_causal = false;  // a compressed causal mask
  bool chunked = false;            // queries see their own chunk of the keys
  Softcap softcap = Softcap::none;
  bool alibi = false;
  bool dropout = false;
  // O is divided by the sum of P as it is rounded for P·V, which outputs of fp32, or of 16 bits and a residual, are
  // precise enough to tell. P of rows with dropout, whose outputs are those of few keys, is two numbers: what rounding
  // leaves is multiplied too. So is P under queries of 8 bits, which promise nothing of 16.
  bool rounded_sums = false;
  bool residual = false;  // what rounding O to 16 bits loses is kept too (softmax/residual.cuh)
  bool user_score = false;
  // By wgmma: the user's score, or ALiBi where no query sees a key after it, is linear in key − query, so that it is an
  // addition to products and to origins (scores/linear_score.cuh).
  bool linear_score = false;
  bool user_mask = false;
  // Instead of user_mask: which keys the mask hides was found by a kernel in front (masks/mark_mask.cuh), as bits.
  bool mask_bits = false;
  Skip skip = Skip::none;  // of lists whose tiles are whole tiles of keys, with a row tile for each query block
  bool merges = false;     // by keys: the last block of a row tile merges its splits
  // K and V are of 8 bits, with descales by key head. By keys they become `type` in registers; by wgmma `type` is e4m3
  // too, and so is P.
  bool eight_bits = false;
  Element key = Element::e4m3;    // with eight_bits
  Element value = Element::e4m3;  // likewise
  bool widens_queries = false;    // by keys: Q is e4m3 and becomes `type` on its way into shared memory
  // Q and K are int8, whose products become scores by descales (scores/descales.cuh); V and P are of `type`.
  bool int8_scores = false;
  bool descales_keys = false;  // of int8: by block or token; rows and keys of a tile have descales of their own
  // Of descales_keys: so many neighbouring columns of a tile, from a multiple of it on, are keys of one block; 1 or a
  // power of two from 16 on.
  int keys_a_descale = 1;
  bool smooth = false;  // of int8: K lacks its mean, whose product with a row is added to the row's scores

  static constexpr const char* type_name() { return "FwdConfig"; }
  /// Every field, in the order above. A kernel's source and name follow from this list
  /// (cuda/source/configuration_text.h), which is counted there.
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("output", c.output);
    visit("d", c.d);
    visit("dv", c.dv);
    visit("dv_parts", c.dv_parts);
    visit("tile_q", c.tile_q);
    visit("tile_kv", c.tile_kv);
    visit("warps", c.warps);
    visit("stages", c.stages);
    visit("ping_pong", c.ping_pong);
    visit("q_kept", c.q_kept);
    visit("source", c.source);
    visit("loader", c.loader);
    visit("products", c.products);
    visit("tiles", c.tiles);
    visit("segments", c.segments);
    visit("granule", c.granule);
    visit("list_elements", c.list_elements);
    visit("list_waives", c.list_waives);
    visit("varlen", c.varlen);
    visit("whole_rows", c.whole_rows);
    visit("trusts", c.trusts);
    visit("scale_first", c.scale_first);
    visit("compressed_causal", c.compressed_causal);
    visit("chunked", c.chunked);
    visit("softcap", c.softcap);
    visit("alibi", c.alibi);
    visit("dropout", c.dropout);
    visit("rounded_sums", c.rounded_sums);
    visit("residual", c.residual);
    visit("user_score", c.user_score);
    visit("linear_score", c.linear_score);
    visit("user_mask", c.user_mask);
    visit("mask_bits", c.mask_bits);
    visit("skip", c.skip);
    visit("merges", c.merges);
    visit("eight_bits", c.eight_bits);
    visit("key", c.key);
    visit("value", c.value);
    visit("widens_queries", c.widens_queries);
    visit("int8_scores", c.int8_scores);
    visit("descales_keys", c.descales_keys);
    visit("keys_a_descale", c.keys_a_descale);
    visit("smooth", c.smooth);
  }

  constexpr bool operator==(const FwdConfig&) const = default;

  /// Whether visible keys of a row are told one by one, beyond an interval.
  constexpr bool tests_elements() const { return list_elements || has_mask(); }
  /// Whether a mask of the user's hides keys one by one.
  constexpr bool has_mask() const { return user_mask || mask_bits; }
  /// By wgmma: whether the producer finds out for each row tile if positions are small, for callables that are called
  /// for elements. A linear score is asked for its slope alone.
  constexpr bool finds_small_positions() const { return (user_score && !linear_score) || user_mask; }
  /// Columns of a tile whose tests by a user's mask are computed together, so that their loads are in flight at once.
  constexpr int mask_columns() const {
    if (products == Products::wgmma && d <= 128 && dv <= 128 && !scale_first) return tile_kv / 4;
    return d > 192 ? 1 : 4;
  }
  /// Whether P is two numbers of 16 bits.
  constexpr bool keeps_rests() const { return rounded_sums && (dropout || widens_queries); }
  constexpr bool gathers() const { return tiles == Tiles::list && granule < tile_kv; }
  /// Of lists: how many granules are collected at a time, and how many of a row tile lie in shared memory, 32 bits each
  /// (tiles/list_collector.cuh). 97 of the 99 KB of SM89 and SM120 hold tiles.
  static constexpr int kListWindow = 1024;
  constexpr int list_granules() const { return products == Products::wgmma ? 512 : 256; }
  /// By wgmma the row tile in work has a ring, and the next.
  constexpr int list_rings() const { return products == Products::wgmma ? 2 : 1; }
  constexpr int list_window_bytes() const { return kListWindow / 8 * (list_waives ? 2 : 1); }
  /// What a warp needs to walk a list by itself, as values that are not finite make it (forward/block_work.cuh).
  static constexpr int kReplayedRuns = 32;
  constexpr int list_replay_bytes() const { return 4 * kReplayedRuns + list_window_bytes(); }
  /// What a list needs behind the tiles. By mma.sync warps walk it again in the memory of tiles.
  constexpr int list_bytes() const {
    if (tiles != Tiles::list) return 0;
    const int replays = products == Products::wgmma ? warps * list_replay_bytes() : 0;
    return list_rings() * 4 * list_granules() + list_window_bytes() + replays;
  }
  /// Registers a thread for S and O, of 255.
  constexpr int accumulators() const { return rows_a_warp() / 16 * (tile_kv + dv) / 2; }
  /// That the compiler is to leave registers for on a multiprocessor: 255 a thread. Left to itself it takes fewer than
  /// shared memory has blocks for, and is up to 18% slower. By wgmma a third where the plainest softmax of narrow tiles
  /// needs half as many.
  constexpr int blocks() const {
    const bool plainest = tiles == Tiles::range && segments == 1 && !compressed_causal && !chunked && !scale_first &&
                          !dropout && !user_score && !linear_score && !user_mask && !int8_scores;
    const bool narrow = tile_kv <= 64 && d <= 64 && dv <= 64;
    if (products == Products::wgmma && threads() == 128 && plainest && narrow) return 3;
    return threads() < 256 ? 256 / threads() : 1;
  }
  constexpr bool uses_tma() const { return loader != Loader::cp_async; }
  /// Whether a warpgroup beside those that compute feeds them.
  constexpr bool has_producer() const { return products == Products::wgmma || loader == Loader::tma_warp; }
  /// Those that compute.
  constexpr int threads() const { return warps * 32; }
  constexpr int block_threads() const { return threads() + (has_producer() ? 128 : 0); }
  /// By keys: tiles that splits of sequences shorter than the longest have at least (tiles/tile_range.cuh).
  constexpr int least_share() const { return by_keys() ? 8 * warps : 0; }
  constexpr bool by_keys() const { return products == Products::mma_by_keys; }
  constexpr int rows_a_warp() const { return by_keys() ? tile_q : tile_q / warps; }
  /// By keys: the memory of a warp's tiles, and what of it holds its part of O, origins and sums in the end.
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int warp_part_bytes() const { return tile_q * dv * 4 + tile_q / 16 * 6 * 32 * 4; }
  /// As they lie in shared memory.
  constexpr Element q_type() const { return int8_scores ? Element::int8 : widens_queries ? Element::fp16 : type; }
  constexpr Element k_type() const { return int8_scores ? Element::int8 : eight_bits ? key : type; }
  constexpr Element v_type() const { return eight_bits ? value : type; }
  /// Of P in the second product by mma.sync. Values of 8 bits are numbers of fp16, to which SM89 and newer convert two
  /// at once.
  constexpr Element p_type() const { return eight_bits ? Element::fp16 : type; }
  constexpr bool has_descales() const { return eight_bits || int8_scores; }
  /// Whether the descales of q and k are one factor of all scores of a row tile, in the products.
  constexpr bool descales_at_once() const { return multiplies_bytes() || (int8_scores && !descales_rows()); }
  /// Whether each row of queries has a factor and a summand of its own. They lie in shared memory behind the ring, with
  /// those of the keys in flight.
  constexpr bool descales_rows() const { return descales_keys || smooth; }
  /// Whether the softmax multiplies by a row's factor, and its origins have the summand (scores/row_shift.cuh): where
  /// that leaves registers enough.
  constexpr bool folds_rows() const {
    const bool walks_plainly = tiles == Tiles::range && segments == 1 && !chunked && !compressed_causal && !user_mask;
    return products == Products::wgmma && descales_rows() && walks_plainly && !scale_first && dv <= 192;
  }
  constexpr int descale_bytes() const {
    return descales_rows() ? tile_q * 8 + (descales_keys ? round_up(stages * tile_descales() * 4, 16) : 0) : 0;
  }
  /// What linear scores keep of each row, a slope and a distance, in shared memory behind the ring.
  constexpr int linear_bytes() const { return linear_score ? tile_q * 8 : 0; }
  /// Of the keys of a tile.
  constexpr int tile_descales() const { return tile_kv / keys_a_descale; }
  constexpr int q_bytes() const { return tile_q * d * bytes_of(q_type()); }
  constexpr int k_bytes() const { return tile_kv * d * bytes_of(k_type()); }
  constexpr int v_bytes() const { return tile_kv * dv * bytes_of(v_type()); }
  /// Whether all products are of 8 bits. V is transposed for them in shared memory (tile/transposed_bytes.cuh).
  constexpr bool multiplies_bytes() const { return products == Products::wgmma && eight_bits; }
  /// Whether it is exponentials that two groups take turns at, and not the beginning of products, which take less time.
  constexpr bool exponentiates_in_turn() const { return multiplies_bytes() && warps == 8 && dv <= 128; }
  /// Whether O is added to sums in shared memory every kPromotedKeys keys (tile/promoted_sums.cuh); of wider heads
  /// there is no room.
  static constexpr int kPromotedKeys = 4096;
  constexpr bool promotes() const { return multiplies_bytes() && dv <= 128; }
  constexpr int promoted_bytes() const { return promotes() ? tile_q * (dv * 4 + 16) : 0; }
  constexpr int transposed_keys() const { return round_up(tile_kv, 64); }
  constexpr int stage_bytes() const {
    return k_bytes() + v_bytes() + (multiplies_bytes() ? transposed_keys() * dv : 0);
  }
  /// Bytes of a row of the narrowest panel that K or V is cut into.
  constexpr int panel_bytes() const {
    const int of_k = columns_of_panel(k_type(), d) * bytes_of(k_type());
    const int of_v = columns_of_panel(v_type(), dv) * bytes_of(v_type());
    return of_k < of_v ? of_k : of_v;
  }
  /// O leaves through the shared memory of Q and of the ring.
  constexpr int o_bytes() const { return tile_q * dv * bytes_of(output); }
  /// Without what a list needs.
  constexpr int tiles_end() const {
    const int row_bytes = promoted_bytes() + descale_bytes() + linear_bytes();
    const int tiles_bytes = q_bytes() + (by_keys() ? warps : 1) * ring_bytes() + row_bytes;
    return kWorkBytes + (tiles_bytes > o_bytes() ? tiles_bytes : o_bytes());
  }
  /// Of a list that moves on by wgmma: a warp's room for what its lanes say of four tiles (sparse/tile_measure.cuh).
  static constexpr int kMeasuredBytes = 4 * 32 * 8;
  constexpr int measured_bytes() const {
    return skip != Skip::none && products == Products::wgmma ? warps * kMeasuredBytes : 0;
  }
  constexpr int smem_bytes() const { return tiles_end() + list_bytes() + measured_bytes(); }
  /// What a block knows of its work lies in front of the tiles; a whole swizzle pattern keeps these aligned.
  static constexpr int kWorkBytes = 1024;
};

}  // namespace tessera::cuda
