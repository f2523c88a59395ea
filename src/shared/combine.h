// SPDX-License-Identifier: Apache-2.0
// The kernel that merges partial results over disjoint keys (splits): its configuration and parameters.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

struct CombineConfig {
  Element parts = Element::fp32;  // of the partial outputs
  Element output = Element::bf16;

  static constexpr const char* type_name() { return "CombineConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
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

/// The grid is (blocks of (row, head) pairs with heads fastest, sequences). A row has a multiple of 8 elements.
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

/// The parameters of forwards whose blocks merge splits themselves; tile_counter.drawn has a counter for each row tile.
struct MergingFwdParams : FwdParams {
  CombineParams merge;
};

}  // namespace tessera::cuda
