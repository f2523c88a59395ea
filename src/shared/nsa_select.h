// SPDX-License-Identifier: Apache-2.0
// The selection of the blocks of tokens to which a tile of queries attends (docs/nsa.md): the configuration and
// parameters of the kernel.
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

/// The rows of a tile that give blocks their scores.
enum class ScoringRows : unsigned char {
  first,
  mean,  // one row: the mean of all
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
  int d = 0;                 // with tensor cores: padded to a multiple of 32; 0: products by fused multiply-adds
  int terms = 1;             // 16-bit numbers whose sum is an element of a scoring row
  int rows = 64;             // vectors for a tile of keys at a time: 64, 32 or, without tensor cores, 16
  int stages = 1;            // tiles of keys in shared memory
  int width = 8;             // elements of q that a thread loads at once: 8 or 1
  int slots = 1;             // capacity of a list, in 32 entries
  int compressed_slots = 0;  // the same for a list of blocks of compressed keys; 0: there is none

  static constexpr const char* type_name() { return "SelectConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
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
  static constexpr int kPitch = kKeys + 8;  // floats between rows of scores: writes of fragments do not conflict
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
  /// Bytes of probabilities that are summed to scores of blocks.
  constexpr int sum_bytes() const { return has_stats() ? score_bytes() : 0; }
  constexpr int stat_bytes(int vectors) const { return has_stats() ? round_up(vectors, 2) * 2 * 4 : 0; }
  constexpr int tile_bytes(int tiles) const { return scoring == ScoringRows::all ? tiles * kPitch * 4 : 0; }
  static constexpr int kStateBytes = 32;     // of a tile
  static constexpr int kKeyStateBytes = 48;  // of a tile's second list
  constexpr bool has_compressed() const { return compressed_slots > 0; }
  constexpr int key_state_bytes(int tiles) const { return has_compressed() ? tiles * kKeyStateBytes : 0; }
  /// Bytes of what each scoring row sees, if it is needed repeatedly.
  constexpr int row_bytes(int all_rows) const {
    return has_stats() || scoring == ScoringRows::all ? round_up(all_rows, 4) * 4 : 0;
  }
  /// `top`: entries of both lists of a tile.
  constexpr int smem_bytes(int dim, int vectors, int all_rows, int tiles, int top) const {
    return query_bytes(dim) + key_bytes() + score_bytes() + factor_bytes() + sum_bytes() + tiles * kStateBytes +
           key_state_bytes(tiles) + row_bytes(all_rows) + stat_bytes(vectors) + tile_bytes(tiles) + tiles * top * 8;
  }
};

/// The output lists of the tiles.
struct SelectedLists {
  int* counts;   // (b, lists, tiles)
  int* indices;  // (b, lists, tiles, top)
  i64 count_strides[3], index_strides[3];
  int top;
};

/// gridDim is (tiles / tiles_together, lists of a tile, sequences).
struct SelectParams {
  CompressionParams compression;
  HeadRows q;
  HeadRows keys;
  const int* cu_seqlens_q;  // (b + 1); null: dense
  const i64* q_offset;      // (b): positions of rows 0; null: 0
  int seqlen_q, total_q;
  SelectedLists selected;
  SelectedLists compressed;  // lists of blocks of compressed keys, if there are any
  Divisor compressed_block;  // compressed keys of a block
  int d;
  float scale;
  Divisor shared_heads;  // query heads of a list
  Divisor lists_a_kv;    // lists that share a key head
  Divisor tile;
  int tiles;
  int tiles_together;  // of a block of threads
  Divisor tile_rows;   // scoring rows of a tile
  int panel_rows;      // scoring rows whose vectors are multiplied by the keys at a time
  int panels;          // panels of the thread block's tiles
  int initial, local;
  bool causal;
  int needed;           // tokens of a compressed block that a row must have seen
  Divisor block;        // tokens
  int blocks_together;  // blocks whose scores are added up at a time
};

}  // namespace tessera::cuda
