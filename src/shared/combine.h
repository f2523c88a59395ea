// SPDX-License-Identifier: Apache-2.0
// Partial results over disjoint keys into one: the configuration of its kernel, and what it is given at run time.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

struct CombineConfig {
  Element parts = Element::fp32;  // of the partial outputs
  Element output = Element::bf16;

  static constexpr const char* type_name() { return "CombineConfig"; }
  /// Every field, in the order above. A kernel's source and name follow from this list
  /// (cuda/source/configuration_text.h), which is counted there.
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("parts", c.parts);
    visit("output", c.output);
  }

  constexpr bool operator==(const CombineConfig&) const = default;
  static constexpr int threads() { return 128; }
  static constexpr int lanes_a_row() { return 16; }  // 8 elements each at a time
  static constexpr int rows_a_block() { return threads() / lanes_a_row(); }
};

/// Grid: x blocks of (row, head), heads fastest; y sequences. Row vectors are multiples of 8 elements.
struct CombineParams {
  const void* o_parts;
  const float* lse_parts;  // −inf: the part has no key, and its o may hold anything
  void* o;
  float* lse;          // null: not wanted
  const float* sinks;  // (heads), or null
  i64 o_part;          // from one part to the next
  i64 lse_part;
  Strides o_parts_strides;
  Strides lse_parts_strides;
  Strides o_strides;
  Strides lse_strides;
  i64 sinks_stride;
  int parts;
  Divisor heads;
  int dv;
  int seqlen_q;             // longest sequence
  int total_q;              // varlen
  const int* cu_seqlens_q;  // null: every sequence has seqlen_q rows
};

/// What forwards are given whose blocks merge splits themselves; its tile_counter.drawn is a counter for each row tile.
struct MergingFwdParams : FwdParams {
  CombineParams merge;
};

}  // namespace tessera::cuda
