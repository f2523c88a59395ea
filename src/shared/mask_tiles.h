// SPDX-License-Identifier: Apache-2.0
// The configuration and parameters of the kernel that evaluates a user's mask before attention (masks/mark_mask.cuh).
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

struct MaskTilesConfig {
  bool classifies = true;  // writes a list of the tiles with visible elements, and one of those without hidden elements
  bool keeps_bits = true;  // writes MaskBits of the tiles that are partial
  bool keys_down = false;  // MaskBits of keys, with bits for queries: for a backward with Gradients::all, one segment
  int segments = 1;
  bool compressed_causal = false;
  bool chunked = false;

  static constexpr const char* type_name() { return "MaskTilesConfig"; }
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("classifies", c.classifies);
    visit("keeps_bits", c.keeps_bits);
    visit("keys_down", c.keys_down);
    visit("segments", c.segments);
    visit("compressed_causal", c.compressed_causal);
    visit("chunked", c.chunked);
  }

  static constexpr int kRows = 16;  // queries, or keys, of a block of threads
  static constexpr int threads() { return 256; }

  // What tests of elements require of a configuration. A warp tests kRows by kMaskBlock elements.
  static constexpr int d = 64;
  static constexpr int tile_kv = kMaskBlock;
  static constexpr bool list_elements = false;
  static constexpr bool user_mask = true;
  static constexpr bool tests_elements() { return true; }
  static constexpr int mask_columns() { return tile_kv / 4; }
};

/// The parameters besides AttentionParams, whose list is read unless the kernel `classifies`.
struct MaskTilesParams {
  // With `classifies`: bitmasks (batch, query block, word) for blocks of kMaskBlock. Bit kb % 32 of word kb / 32 is
  // that of key block kb.
  u32* visible;    // whether the mask shows any of its keys to any of its queries
  u32* full;       // whether the mask hides none
  int words;       // of a query block
  i64 list_words;  // of `visible`, and of `full`
  bool resets;     // the launch that only sets `visible` to zeros and `full` to ones
  int key_blocks;  // of all segments
  MaskBits bits;
};

}  // namespace tessera::cuda
