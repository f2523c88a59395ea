// SPDX-License-Identifier: Apache-2.0
// The configuration of a forward kernel: everything that changes registers or instructions, and nothing else.
#pragma once

#include "shared/types.h"

namespace tessera::cuda {

/// The layout of K and V.
enum class Source : unsigned char {
  strided,  // dense and varlen
  paged,    // a 2-D table or CSR
  mixed,    // one of two segments is paged, the other is not; which one is known at run time
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

/// The rule that advances a list to the next step (docs/skip-state.md).
enum class Skip : unsigned char {
  none,       // the list does not change
  mass,       // by the rows' masses in its tiles, relative to the LSE of the previous step
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

/// How tiles are copied to shared memory.
enum class Loader : unsigned char {
  cp_async,  // 16 bytes a thread, by all threads
  // By the TMA, SM90 and newer; with mma.sync only strided sources. With wgmma a producer warp issues the copies, with
  // mma.sync a compute warp.
  tma,
  tma_warp,  // with mma.sync: a producer warp issues the copies of the TMA
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

/// The instructions that compute products, and the share of a warp.
enum class Products : unsigned char {
  mma_sync,     // each warp has its own rows; SM80 and newer
  wgmma,        // asynchronous, with a producer warpgroup; SM90
  mma_by_keys,  // mma.sync: each warp has all rows of the block and its own tiles of keys; for few rows, SM80 and newer
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
  exponential,  // by e^2u: faster; its error is up to a rounding of the cap
  rational,     // its error is some roundings of the score
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
  int dv = 128;                    // the columns of v and o that a block takes, padded: a multiple of 32
  int dv_parts = 1;                // blocks that share the columns of v and o; each computes all scores
  int tile_q = 128;                // rows of queries; the heads of a group are packed into them
  int tile_kv = 64;                // keys
  int warps = 4;                   // each takes rows_a_warp() rows, a multiple of 16
  int stages = 1;                  // tiles of K and V in flight
  bool ping_pong = true;           // with wgmma: warpgroups take turns (as in FlashAttention-3)
  int q_kept = 0;  // columns of Q, a multiple of 16, that stay in registers; others are read for every tile of keys
  Source source = Source::strided;
  Loader loader = Loader::cp_async;
  Products products = Products::mma_sync;
  Tiles tiles = Tiles::range;
  int segments = 1;  // sources of keys
  // The number of consecutive keys that a list keeps or skips together: tile_kv, or a divisor of it that is at least
  // 16. A tile of a list gathers tile_kv / granule granules.
  int granule = 64;
  bool list_elements = false;  // list blocks and kernel tiles are not aligned: each element is looked up
  bool list_waives = false;    // the list has full tiles, in which the user's mask is not evaluated
  bool varlen = false;         // with wgmma: sequences are packed; each has the row tiles of its own length
  bool whole_rows = false;     // with wgmma: TMA boxes have all columns of a page's rows (tile/swizzle.cuh)
  bool trusts = false;         // page ids and key blocks of lists are not tested; wrong ones access other memory
  // Scores are scaled before their maxima are taken: with softcap, ALiBi or a user's score, unless linear_score; and
  // with a scale that is not positive.
  bool scale_first = false;
  bool compressed_causal = false;  // a compressed causal mask
  bool chunked = false;            // queries see their own chunk of the keys
  Softcap softcap = Softcap::none;
  bool alibi = false;
  bool dropout = false;
  // O is divided by the sum of P as rounded for P·V. Outputs of fp32, or of 16 bits and a residual, are precise enough
  // for this to matter. With dropout, where few keys make an output, P is two numbers: its rounding error is multiplied
  // by V too. So it is with 8-bit queries, which do not imply a precision of 16 bits.
  bool rounded_sums = false;
  // With wgmma and rounded_sums: the tensor cores compute these sums, as the product of P with eight columns of ones
  // beside V. Without, P is unpacked and added.
  bool sums_by_product = false;
  bool residual = false;  // the rounding error of O in 16 bits is stored too (softmax/residual.cuh)
  bool user_score = false;
  // With wgmma: the user's score, or ALiBi if no query sees a later key, is linear in key − query, so that it is added
  // to products and to origins (scores/linear_score.cuh).
  bool linear_score = false;
  bool user_mask = false;
  // Instead of user_mask: a kernel before this one has computed which keys the mask hides, as bits
  // (masks/mark_mask.cuh).
  bool mask_bits = false;
  Skip skip = Skip::none;  // for lists whose blocks are whole tiles of keys, with a row tile for each query block
  bool merges = false;     // with mma_by_keys: the last block of a row tile merges its splits
  // K and V have 8 bits, with descales by key head. With mma_by_keys, they are converted in registers, K to q_type()
  // and V to p_type(); with wgmma, `type` is e4m3 too, and so is P.
  bool eight_bits = false;
  Element key = Element::e4m3;    // with eight_bits
  Element value = Element::e4m3;  // likewise
  bool widens_queries = false;    // with mma_by_keys: Q is e4m3 and becomes fp16 in shared memory
  // Q and K are int8; descales convert their products to scores (scores/descales.cuh). V and P have `type`.
  bool int8_scores = false;
  bool descales_keys = false;  // with int8_scores: by block or token; each row and key of a tile has its own
  // With descales_keys: the number of neighbouring columns of a tile, aligned to it, that are keys of one block; 1, or
  // a power of two from 16 on.
  int keys_a_descale = 1;
  bool smooth = false;  // with int8_scores: K lacks its mean, whose product with a row is added to the row's scores

  static constexpr const char* type_name() { return "FwdConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
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
    visit("sums_by_product", c.sums_by_product);
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

  /// Whether elements are tested one by one, besides the interval of each row.
  constexpr bool tests_elements() const { return list_elements || has_mask(); }
  /// Whether there is a user's mask.
  constexpr bool has_mask() const { return user_mask || mask_bits; }
  /// With wgmma: whether the producer finds for each row tile if positions are small, for callables that are called for
  /// elements. A linear score is called for its slope only.
  constexpr bool finds_small_positions() const { return (user_score && !linear_score) || user_mask; }
  /// The columns of a thread in a tile for which a user's mask is evaluated together, so that its loads overlap.
  constexpr int mask_columns() const {
    if (products == Products::wgmma && d <= 128 && dv <= 128 && !scale_first) return tile_kv / 4;
    return d > 192 ? 1 : 4;
  }
  /// Tiles of 8 columns that P is multiplied into: those of O, and one of the sums.
  constexpr int output_tiles() const { return dv / 8 + (sums_by_product ? 1 : 0); }
  /// Whether P is the sum of two 16-bit numbers.
  constexpr bool keeps_rests() const { return rounded_sums && (dropout || widens_queries); }
  constexpr bool gathers() const { return tiles == Tiles::list && granule < tile_kv; }
  /// With a list: granules that are collected at a time, and granules of a row tile in shared memory, 32 bits each
  /// (tiles/list_collector.cuh). Tiles take 97 of the 99 KB of SM89 and SM120.
  static constexpr int kListWindow = 1024;
  constexpr int list_granules() const { return products == Products::wgmma ? 512 : 256; }
  /// With wgmma, the current row tile and the next one each have a ring.
  constexpr int list_rings() const { return products == Products::wgmma ? 2 : 1; }
  constexpr int list_window_bytes() const { return kListWindow / 8 * (list_waives ? 2 : 1); }
  /// The memory of a warp that walks a list once more by itself, for values that are not finite
  /// (forward/replayed_list.cuh): granules of its ring, and bytes.
  static constexpr int kReplayedGranules = 32;
  constexpr int list_replay_bytes() const { return 4 * kReplayedGranules + list_window_bytes(); }
  /// Bytes that a list needs behind the tiles. With mma.sync, warps walk it once more in the memory of the tiles.
  constexpr int list_bytes() const {
    if (tiles != Tiles::list) return 0;
    const int replays = products == Products::wgmma ? warps * list_replay_bytes() : 0;
    return list_rings() * 4 * list_granules() + list_window_bytes() + replays;
  }
  /// Accumulator registers of a thread, of its 255: for S and O.
  constexpr int accumulators() const { return rows_a_warp() / 16 * (tile_kv + dv) / 2; }
  /// The blocks of a multiprocessor for which the compiler leaves registers, so that a thread may have 255. Without
  /// this bound it uses fewer registers than the blocks that fit shared memory leave, and kernels are up to 18% slower.
  /// With wgmma there are three blocks if the softmax is the simplest one and tiles are narrow: these need half as many
  /// registers.
  constexpr int blocks() const {
    const bool plainest = tiles == Tiles::range && segments == 1 && !compressed_causal && !chunked && !scale_first &&
                          !dropout && !user_score && !linear_score && !user_mask && !int8_scores;
    const bool narrow = tile_kv <= 64 && d <= 64 && dv <= 64;
    if (products == Products::wgmma && threads() == 128 && plainest && narrow) return 3;
    return threads() < 256 ? 256 / threads() : 1;
  }
  constexpr bool uses_tma() const { return loader != Loader::cp_async; }
  /// Whether the block has a producer warpgroup beside its compute warps.
  constexpr bool has_producer() const { return products == Products::wgmma || loader == Loader::tma_warp; }
  /// Compute threads, without the producer.
  constexpr int threads() const { return warps * 32; }
  constexpr int block_threads() const { return threads() + (has_producer() ? 128 : 0); }
  /// With mma_by_keys: the least number of tiles of a split of a sequence that is shorter than the longest
  /// (tiles/tile_range.cuh).
  constexpr int least_share() const { return by_keys() ? 8 * warps : 0; }
  constexpr bool by_keys() const { return products == Products::mma_by_keys; }
  constexpr int rows_a_warp() const { return by_keys() ? tile_q : tile_q / warps; }
  /// With mma_by_keys: bytes of a warp's tiles, and of its part of O, origins and sums, which take their place in the
  /// end.
  constexpr int ring_bytes() const { return stages * stage_bytes(); }
  constexpr int warp_part_bytes() const { return tile_q * dv * 4 + tile_q / 16 * 6 * 32 * 4; }
  /// The types in shared memory.
  constexpr Element q_type() const { return int8_scores ? Element::int8 : widens_queries ? Element::fp16 : type; }
  constexpr Element k_type() const { return int8_scores ? Element::int8 : eight_bits ? key : type; }
  constexpr Element v_type() const { return eight_bits ? value : type; }
  /// The type of P in P·V by mma.sync. 8-bit values are converted to fp16, because SM89 and newer convert two at once.
  constexpr Element p_type() const { return eight_bits ? Element::fp16 : type; }
  constexpr bool has_descales() const { return eight_bits || int8_scores; }
  /// Whether the descales of q and k are one factor of all products of a row tile.
  constexpr bool descales_at_once() const { return multiplies_bytes() || (int8_scores && !descales_rows()); }
  /// Whether each row of queries has its own factor and summand. They lie in shared memory behind the ring, with those
  /// of the keys in flight.
  constexpr bool descales_rows() const { return descales_keys || smooth; }
  /// Whether the softmax multiplies by a row's factor, and its origins contain the summand (scores/row_shift.cuh). It
  /// does if registers suffice.
  constexpr bool folds_rows() const {
    const bool walks_plainly = tiles == Tiles::range && segments == 1 && !chunked && !compressed_causal && !user_mask;
    return products == Products::wgmma && descales_rows() && walks_plainly && !scale_first && dv <= 192;
  }
  constexpr int descale_bytes() const {
    return descales_rows() ? tile_q * 8 + (descales_keys ? round_up(stages * tile_descales() * 4, 16) : 0) : 0;
  }
  /// Bytes that linear scores need for each row's slope and distance, in shared memory behind the ring.
  constexpr int linear_bytes() const { return linear_score ? tile_q * 8 : 0; }
  /// Descales of the keys of a tile.
  constexpr int tile_descales() const { return tile_kv / keys_a_descale; }
  constexpr int q_bytes() const { return tile_q * d * bytes_of(q_type()); }
  constexpr int k_bytes() const { return tile_kv * d * bytes_of(k_type()); }
  constexpr int v_bytes() const { return tile_kv * dv * bytes_of(v_type()); }
  /// Whether all products have 8-bit operands. V is transposed for them in shared memory (tile/transposed_bytes.cuh).
  constexpr bool multiplies_bytes() const { return products == Products::wgmma && eight_bits; }
  /// Whether two warpgroups take turns at exponentials, instead of at the issue of products: 8-bit products take less
  /// time than the exponentials.
  constexpr bool exponentiates_in_turn() const { return multiplies_bytes() && warps == 8 && dv <= 128; }
  /// Whether O is added to sums in shared memory every kPromotedKeys keys (tile/promoted_sums.cuh). For wider heads
  /// there is no room.
  static constexpr int kPromotedKeys = 4096;
  constexpr bool promotes() const { return multiplies_bytes() && dv <= 128; }
  constexpr int promoted_bytes() const { return promotes() ? tile_q * (dv * 4 + 16) : 0; }
  /// With sums_by_product, a panel of ones lies behind each tile of V.
  constexpr int ones_bytes() const {
    return sums_by_product ? tile_kv * columns_of_panel(v_type(), dv) * bytes_of(v_type()) : 0;
  }
  constexpr int transposed_keys() const { return round_up(tile_kv, 64); }
  constexpr int stage_bytes() const {
    return k_bytes() + v_bytes() + (multiplies_bytes() ? transposed_keys() * dv : 0) + ones_bytes();
  }
  /// Bytes of a row of a panel of K or of V, whichever is narrower.
  constexpr int panel_bytes() const {
    const int of_k = columns_of_panel(k_type(), d) * bytes_of(k_type());
    const int of_v = columns_of_panel(v_type(), dv) * bytes_of(v_type());
    return of_k < of_v ? of_k : of_v;
  }
  /// O is stored through the shared memory of Q and of the ring.
  constexpr int o_bytes() const { return tile_q * dv * bytes_of(output); }
  /// Bytes of shared memory, without what a list needs.
  constexpr int tiles_end() const {
    const int row_bytes = promoted_bytes() + descale_bytes() + linear_bytes();
    const int tiles_bytes = q_bytes() + (by_keys() ? warps : 1) * ring_bytes() + row_bytes;
    return kWorkBytes + (tiles_bytes > o_bytes() ? tiles_bytes : o_bytes());
  }
  /// With `skip` and wgmma: the memory of a warp for its lanes' numbers of four tiles (sparse/tile_measure.cuh).
  static constexpr int kMeasuredBytes = 4 * 32 * 8;
  constexpr int measured_bytes() const {
    return skip != Skip::none && products == Products::wgmma ? warps * kMeasuredBytes : 0;
  }
  constexpr int smem_bytes() const { return tiles_end() + list_bytes() + measured_bytes(); }
  /// The description of a block's work lies before the tiles. It takes a whole swizzle pattern, so that tiles are
  /// aligned.
  static constexpr int kWorkBytes = 1024;
};

}  // namespace tessera::cuda
