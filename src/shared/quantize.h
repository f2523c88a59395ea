// SPDX-License-Identifier: Apache-2.0
// The conversion of rows to 8 bits and descales: the configuration and parameters of its kernels.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

/// What one launch does. Each launch reads the results of those before it.
enum class QuantizePhase : unsigned char {
  clear,    // sets the count of saturated elements to 0
  sum,      // adds rows, for their mean
  mean,     // divides the sums
  largest,  // finds the largest magnitudes of parts of a sequence, for descales by head
  round,    // finds the other descales, and rounds
};

constexpr Spelling spelling(QuantizePhase phase) {
  switch (phase) {
    case QuantizePhase::clear:
      return {"QuantizePhase", "clear"};
    case QuantizePhase::sum:
      return {"QuantizePhase", "sum"};
    case QuantizePhase::mean:
      return {"QuantizePhase", "mean"};
    case QuantizePhase::largest:
      return {"QuantizePhase", "largest"};
    case QuantizePhase::round:
      return {"QuantizePhase", "round"};
  }
  return {};
}

/// Which elements share a descale: those of a (batch, key head), of a block of a head's tokens, or of a row.
enum class DescaleGrain : unsigned char { head, block, token };

constexpr Spelling spelling(DescaleGrain grain) {
  switch (grain) {
    case DescaleGrain::head:
      return {"DescaleGrain", "head"};
    case DescaleGrain::block:
      return {"DescaleGrain", "block"};
    case DescaleGrain::token:
      return {"DescaleGrain", "token"};
  }
  return {};
}

struct QuantizeConfig {
  QuantizePhase phase = QuantizePhase::round;
  Element from = Element::bf16;
  Element to = Element::e4m3;
  DescaleGrain grain = DescaleGrain::head;
  int width = 8;   // elements that a thread loads at once: 8 if a row is a multiple of 8, else 1
  int lanes = 16;  // lanes of a warp that share a row, a power of two
  int steps = 1;   // a thread has steps · width elements of a row
  bool hadamard = false;
  bool smooth = false;
  bool given = false;   // the caller gives the descales
  bool counts = false;  // saturated elements are counted

  static constexpr const char* type_name() { return "QuantizeConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("phase", c.phase);
    visit("from", c.from);
    visit("to", c.to);
    visit("grain", c.grain);
    visit("width", c.width);
    visit("lanes", c.lanes);
    visit("steps", c.steps);
    visit("hadamard", c.hadamard);
    visit("smooth", c.smooth);
    visit("given", c.given);
    visit("counts", c.counts);
  }

  constexpr bool operator==(const QuantizeConfig&) const = default;
  static constexpr int threads() { return 256; }
  /// Rows that the threads of a block have at a time, and rows that a thread loads before it uses the first of them.
  constexpr int rows() const { return threads() / lanes; }
  constexpr int ahead() const { return width * steps <= 8 ? 4 : 1; }
};

/// The grid has one dimension. With descales by head, a thread block takes `part_rows` rows of a (batch, key head); by
/// block, the rows of one block; by token, rows() · ahead() rows that are adjacent in memory.
struct QuantizeParams {
  const void* x;
  unsigned char* quantized;
  float* descales;
  Strides x_strides;
  Strides quantized_strides;
  i64 descale_batch, descale_head;  // strides; the last dimension is contiguous
  bool packed_descales;             // by token, of packed sequences: descales have no batch dimension
  float* mean;                      // (batch, heads, d)
  i64 mean_batch, mean_head;
  u64* saturated;

  // In the workspace.
  float* sums;        // (batch, heads, parts, d)
  float* magnitudes;  // (batch, key heads, parts)

  int d;
  int seqlen;  // longest sequence
  int total;   // varlen
  const int* cu_seqlens;
  const int* seqused;
  Divisor heads;
  Divisor key_heads;
  Divisor group;   // heads that share a descale by head
  Divisor parts;   // of a (batch, key head)
  int part_rows;   // rows (token, head of the group) of a part
  Divisor blocks;  // by block: blocks of a sequence; by token: thread blocks that share a sequence's rows
  int block;       // tokens

  float rotation_scale;  // 1 / √(length of a rotation)
  int rotated_chunks;    // the length of a rotation, in chunks of `width`
  u64 seed;
  const u64* seed_at;  // (1)
};

}  // namespace tessera::cuda
