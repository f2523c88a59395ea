// SPDX-License-Identifier: Apache-2.0
// Which blocks of tokens a tile of queries attends to (docs/nsa.md): the configuration of the kernel, and what it is
// given at run time.
#pragma once

#include "shared/nsa.h"

namespace tessera::cuda {

enum class BlockScore : unsigned char {
  dot,      // products, added over the heads that share a list
  softmax,  // probabilities, likewise
};

constexpr Spelling spelling(BlockScore score) {
  switch (score) {
    case BlockScore::dot:
      return {"BlockScore", "dot"};
    case BlockScore::softmax:
      return {"BlockScore", "softmax"};
  }
  return {};
}

/// Which rows of a tile score.
enum class ScoringRows : unsigned char {
  first,
  mean,  // one, the mean of all
  all,   // the largest score counts
};

constexpr Spelling spelling(ScoringRows rows) {
  switch (rows) {
    case ScoringRows::first:
      return {"ScoringRows", "first"};
    case ScoringRows::mean:
      return {"ScoringRows", "mean"};
    case ScoringRows::all:
      return {"ScoringRows", "all"};
  }
  return {};
}

struct SelectConfig {
  Element q = Element::bf16;
  Element k = Element::bf16;
  BlockScore score = BlockScore::dot;
  ScoringRows scoring = ScoringRows::first;
  int d = 0;                 // tensor cores: padded to a multiple of 32; 0: products by fused multiply-adds
  int terms = 1;             // 16-bit numbers that add up to one of a scoring row
  int rows = 64;             // vectors that meet a tile of keys together: 64, 32 or, without tensor cores, 16
  int stages = 1;            // tiles of keys in shared memory
  int width = 8;             // elements of q that a thread loads at once: 8 or 1
  int slots = 1;             // 32s of entries that a list has room for
  int compressed_slots = 0;  // likewise of a list of blocks of compressed keys; 0: there is none

  static constexpr const char* type_name() { return "SelectConfig"; }
  /// Every field, in the order above. A kernel's source and name follow from this list
  /// (cuda/source/configuration_text.h), which is counted there.
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("q", c.q);
    visit("k", c.k);
    visit("score", c.score);
    visit("scoring", c.scoring);
    visit("d", c.d);
    visit("terms", c.terms);
    visit("rows", c.rows);
    visit("stages", c.stages);
    visit("width", c.width);
    visit("slots", c.slots);
    visit("compressed_slots", c.compressed_slots);
  }

  constexpr bool operator==(const SelectConfig&) const = default;
  static constexpr int kWarps = 8;
  static constexpr int kKeys = 64;          // of a tile
  static constexpr int kPitch = kKeys + 8;  // floats between rows of scores: lanes that write a fragment meet no bank
  static constexpr int kSlice = 32;         // columns of keys at a time, without tensor cores
  static constexpr int threads() { return kWarps * 32; }
  constexpr bool mma() const { return d > 0; }
  constexpr bool has_stats() const { return score == BlockScore::softmax; }

  /// Bytes of shared memory, in the order in which they lie there. `dim`: of q.
  constexpr int query_bytes(int dim) const {
    return mma() ? terms * rows * d * bytes_of(q) : rows * round_up(dim, kSlice) * 4;
  }
  constexpr int key_bytes() const { return mma() ? stages * kKeys * d * bytes_of(k) : kKeys * (kSlice + 1) * 4; }
  constexpr int score_bytes() const { return rows * kPitch * 4; }
  constexpr int factor_bytes() const { return rows * 2 * 4; }
  /// Probabilities added to scores of blocks.
  constexpr int sum_bytes() const { return has_stats() ? score_bytes() : 0; }
  constexpr int stat_bytes(int vectors) const { return has_stats() ? round_up(vectors, 2) * 2 * 4 : 0; }
  constexpr int tile_bytes(int tiles) const { return scoring == ScoringRows::all ? tiles * kPitch * 4 : 0; }
  static constexpr int kStateBytes = 32;     // of a tile
  static constexpr int kKeyStateBytes = 48;  // of a tile's second list
  constexpr bool has_compressed() const { return compressed_slots > 0; }
  constexpr int key_state_bytes(int tiles) const { return has_compressed() ? tiles * kKeyStateBytes : 0; }
  /// What each scoring row sees, where that is asked for again and again.
  constexpr int row_bytes(int all_rows) const {
    return has_stats() || scoring == ScoringRows::all ? round_up(all_rows, 4) * 4 : 0;
  }
  /// `top`: entries of both lists of a tile.
  constexpr int smem_bytes(int dim, int vectors, int all_rows, int tiles, int top) const {
    return query_bytes(dim) + key_bytes() + score_bytes() + factor_bytes() + sum_bytes() + tiles * kStateBytes +
           key_state_bytes(tiles) + row_bytes(all_rows) + stat_bytes(vectors) + tile_bytes(tiles) + tiles * top * 8;
  }
};

/// Where a list of each tile goes.
struct SelectedLists {
  int* counts;   // (b, lists, tiles)
  int* indices;  // (b, lists, tiles, top)
  i64 count_strides[3], index_strides[3];
  int top;
};

/// gridDim is (tiles / those of a block of threads, lists of a tile, sequences).
struct SelectParams {
  CompressionParams compression;
  HeadRows q;
  HeadRows keys;
  const int* cu_seqlens_q;  // (b + 1); null: dense
  const i64* q_offset;      // (b): positions of rows 0; null: 0
  int seqlen_q, total_q;
  SelectedLists selected;
  SelectedLists compressed;  // lists of blocks of compressed keys, if there are any
  Divisor compressed_block;  // compressed keys
  int d;
  float scale;
  Divisor shared_heads;  // query heads of a list
  Divisor lists_a_kv;    // lists that share a key head
  Divisor tile;
  int tiles;
  int tiles_together;  // of a block of threads
  Divisor tile_rows;   // scoring rows of a tile
  int panel_rows;      // scoring rows whose vectors meet the keys together
  int panels;          // of the block's tiles
  int initial, local;
  bool causal;
  int needed;           // tokens of a compressed block that a row must have seen
  Divisor block;        // tokens
  int blocks_together;  // whose scores are added up together
};

}  // namespace tessera::cuda
