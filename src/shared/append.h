// SPDX-License-Identifier: Apache-2.0
// The kernel that appends new tokens to a cache of keys and values: its configuration and parameters.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

enum class Rotation : unsigned char { none, half, interleaved };

constexpr Spelling spelling(Rotation rotation) {
  switch (rotation) {
    case Rotation::none:
      return {"Rotation", "none"};
    case Rotation::half:
      return {"Rotation", "half"};
    case Rotation::interleaved:
      return {"Rotation", "interleaved"};
  }
  return {};
}

struct AppendConfig {
  Element q = Element::bf16;
  Element k = Element::bf16;
  Element v = Element::bf16;
  Rotation rotation = Rotation::none;
  int width = 8;  // elements that a thread moves at once: 8 where all dims allow it, else 1

  static constexpr const char* type_name() { return "AppendConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("q", c.q);
    visit("k", c.k);
    visit("v", c.v);
    visit("rotation", c.rotation);
    visit("width", c.width);
  }

  constexpr bool operator==(const AppendConfig&) const = default;
  static constexpr int threads() { return 128; }
};

/// There is one thread block for each token: gridDim is (seqlen_q, batch).
struct AppendParams {
  const void* k_new;
  const void* v_new;
  const void* q;    // null: no queries to rotate
  void* q_rotated;  // as q
  Strides k_new_strides;
  Strides v_new_strides;
  Strides q_strides;
  Strides q_rotated_strides;
  KvParams kv;  // the cache, which is written; seqused: lengths before the append
  int heads_q, heads_kv;
  int d, dv;
  int seqlen_q;  // longest sequence of new tokens
  int total_q;   // varlen
  const int* cu_seqlens_q;
  const int* seqused_q;

  const void* cosines;  // (positions, rotary_dim / 2)
  const void* sines;
  i64 cosine_stride, sine_stride;
  int positions;
  int rotary_dim;
  bool cosines_fp32, sines_fp32;  // else they have k's type
};

}  // namespace tessera::cuda
