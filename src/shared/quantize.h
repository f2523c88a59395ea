// SPDX-License-Identifier: Apache-2.0
// Rows to 8 bits and their descales: the configuration of its kernels, and what they are given at run time.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

/// What one launch does. Each reads what those in front of it have found.
enum class QuantizePhase : unsigned char {
  clear,    // sets the count of saturated elements to 0
  sum,      // adds rows, for their mean
  mean,     // divides the sums
  largest,  // finds magnitudes of parts of a sequence, for descales by head
  round,    // finds other descales, rounds
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

/// Which elements share a descale: those of a (batch, key head), of a block of a head's tokens, of a row.
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
  int width = 8;   // elements that a thread loads at once: 8 where the row is a multiple, else 1
  int lanes = 16;  // of a warp that have a row, a power of two
  int steps = 1;   // times `width` elements of a thread, until the lanes have the row
  bool hadamard = false;
  bool smooth = false;
  bool given = false;   // descales
  bool counts = false;  // saturated elements

  static constexpr const char* type_name() { return "QuantizeConfig"; }
  /// Every field, in the order above. A kernel's source and name follow from this list
  /// (cuda/source/configuration_text.h), which is counted there.
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
  /// Rows that the threads of a block have at a time, and those that each of them loads before it uses any.
  constexpr int rows() const { return threads() / lanes; }
  constexpr int ahead() const { return width * steps <= 8 ? 4 : 1; }
};

/// The grid has one dimension. By head a block takes `part_rows` rows of a (batch, key head), by block the rows of one
/// block, by token rows() · ahead() neighbours in memory.
struct QuantizeParams {
  const void* x;
  unsigned char* quantized;
  float* descales;
  Strides x_strides;
  Strides quantized_strides;
  i64 descale_batch, descale_head;  // strides; neighbours in the last dimension lie side by side
  bool packed_descales;             // by token, of packed sequences: the batch is none of their dimensions
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
  int part_rows;   // of rows (token, head of the group)
  Divisor blocks;  // by block: of a sequence; by token: that share a sequence's rows
  int block;       // tokens

  float rotation_scale;  // 1 / √(length of a rotation)
  int rotated_chunks;    // the length of a rotation, in chunks of `width`
  u64 seed;
  const u64* seed_at;  // (1)
};

}  // namespace tessera::cuda
