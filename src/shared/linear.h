// SPDX-License-Identifier: Apache-2.0
// A decode step of linear attention: the configurations and parameters of its kernels.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

enum class StateRows : unsigned char { v, k };  // the other dimension is contiguous

constexpr Spelling spelling(StateRows rows) {
  switch (rows) {
    case StateRows::v:
      return {"StateRows", "v"};
    case StateRows::k:
      return {"StateRows", "k"};
  }
  return {};
}

struct LinearConfig {
  Element q = Element::bf16;
  Element k = Element::bf16;
  Element v = Element::bf16;
  Element o = Element::bf16;
  Element state = Element::fp32;
  StateRows rows = StateRows::v;
  int d = 128;    // columns of k that a block takes
  int parts = 1;  // parts of k, each with its own blocks; another kernel adds up their fp32 outputs
  int tile = 32;  // columns of v that a block takes, which are rows or columns of the state
  int warps = 4;
  bool stochastic = false;  // rounding of bf16 states
  // A step of one token, with StateRows::v: each thread loads what it needs of q, k and v from memory to registers.
  // Otherwise the threads of a block share the tokens in shared memory.
  bool one_token = false;

  static constexpr const char* type_name() { return "LinearConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("q", c.q);
    visit("k", c.k);
    visit("v", c.v);
    visit("o", c.o);
    visit("state", c.state);
    visit("rows", c.rows);
    visit("d", c.d);
    visit("parts", c.parts);
    visit("tile", c.tile);
    visit("warps", c.warps);
    visit("stochastic", c.stochastic);
    visit("one_token", c.one_token);
  }

  constexpr bool operator==(const LinearConfig&) const = default;
  constexpr int threads() const { return warps * 32; }
  /// Elements of the state in the 16 bytes that a thread loads at once.
  constexpr int width() const { return 16 / bytes_of(state); }
  constexpr int row() const { return rows == StateRows::v ? d : tile; }
  /// Neighbouring lanes that share a row, or a part of one.
  constexpr int lanes() const { return row() / width() < 32 ? row() / width() : 32; }
  constexpr int loads_a_row() const { return row() / width() / lanes(); }
  /// Rows of which a thread has elements.
  constexpr int rows_a_thread() const { return (rows == StateRows::v ? tile : d) / (warps * (32 / lanes())); }
  constexpr int loads() const { return rows_a_thread() * loads_a_row(); }
  /// Whether all threads have the same amount of work. Besides, with StateRows::k a thread has one load of a row, and
  /// with StateRows::v a row's lanes are enough for each to take the sum of one of a thread's rows.
  constexpr bool is_even() const {
    return row() % width() == 0 && (row() / width()) % lanes() == 0 && (lanes() & (lanes() - 1)) == 0 &&
           rows_a_thread() * warps * (32 / lanes()) == (rows == StateRows::v ? tile : d) && rows_a_thread() >= 1 &&
           (rows_a_thread() & (rows_a_thread() - 1)) == 0 &&
           (rows == StateRows::v ? rows_a_thread() <= lanes() : loads_a_row() == 1);
  }
  /// Whether 32 registers are enough, so that a multiprocessor holds all the threads it can.
  constexpr bool is_small() const {
    return one_token && parts == 1 && loads() <= 2 && state == Element::fp32 && q == Element::bf16 &&
           k == Element::bf16;
  }
  /// The blocks with which a multiprocessor holds all the threads it can; `arch` is 900 for SM90.
  constexpr int resident(int arch) const {
    return (arch == 800 || arch == 900 || arch / 100 == 10 ? 2048 : 1536) / threads();
  }
  /// Bytes of q, k and the block's part of v, for `tokens` tokens in fp32, and of the partial sums of o of each warp.
  constexpr int smem_bytes(int tokens) const {
    if (one_token) return 0;
    const int sums = rows == StateRows::k ? warps * tile : 0;
    return tokens * (2 * d + tile + sums) * static_cast<int>(sizeof(float));
  }
  /// The same with a ring: q, k and the block's part of v in their own types, for all tokens; the tokens' weights; and
  /// the partial sums.
  constexpr int ring_smem_bytes(int tokens, int ring) const {
    const int sums = rows == StateRows::k ? warps * tile : 0;
    const int floats = tokens * (ring + tokens + sums);
    return tokens * d * bytes_of(q) + (ring + tokens) * (d * bytes_of(k) + ring_value_row()) +
           floats * static_cast<int>(sizeof(float));
  }
  constexpr int ring_value_row() const { return tile * bytes_of(v) + 16; }
};

/// gridDim is (tiles of v · parts of k, heads, batch).
struct LinearParams {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  i64 o_part;  // from one part's o to the next's
  void* state;
  i64 slot_stride, head_stride, row_stride;
  i64 slots;                               // states in the pool; a slot outside is none
  const void* state_slots;                 // (b); null: sequence b has state b
  const void* dest_slots;                  // (b); null: state_slots
  bool long_state_slots, long_dest_slots;  // int64, else int32
  const float* slopes;                     // (heads)
  float scale;
  int tokens;
  u64 seed, offset;                // of stochastic rounding, unless they lie in memory:
  const u64 *seed_at, *offset_at;  // (1)
};

/// The second kernel of a step in parts: it adds up their outputs.
struct LinearSumConfig {
  Element output = Element::bf16;
  int parts = 2;

  static constexpr const char* type_name() { return "LinearSumConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("output", c.output);
    visit("parts", c.parts);
  }

  constexpr bool operator==(const LinearSumConfig&) const = default;
  static constexpr int threads() { return 256; }
};

/// There is a thread for each element of o.
struct LinearSumParams {
  const float* parts;  // (parts, batch, tokens, heads, columns)
  void* o;
  Strides o_strides;
  int count;  // elements of a part
  Divisor columns, heads, tokens;
};

/// A step whose tokens wait in a ring beside the state until the ring is full; with 0 tokens, a flush.
struct LinearRingParams {
  LinearParams step;  // without destinations
  void* ring_k;       // (slots, heads, 2 · ring, d); strides of a slot, a row and a head
  void* ring_v;
  Strides ring_k_strides;
  Strides ring_v_strides;
  const int* cursors;  // (b): half · (ring + 1) + tokens that wait there; another value counts as the nearest of these
  int ring;
};

}  // namespace tessera::cuda
