// SPDX-License-Identifier: Apache-2.0
// The gating of the three branches of native sparse attention (docs/nsa.md): the configurations and parameters of its
// kernels.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

inline constexpr int kGates = 3;  // of the compressed, selected and window branch

enum class GateSource : unsigned char { sigmoid, given, mean };

constexpr Spelling spelling(GateSource source) {
  switch (source) {
    case GateSource::sigmoid:
      return {"GateSource", "sigmoid"};
    case GateSource::given:
      return {"GateSource", "given"};
    case GateSource::mean:
      return {"GateSource", "mean"};
  }
  return {};
}

struct GateConfig {
  Element q = Element::bf16;  // of q and the gates' weights
  Element v = Element::bf16;  // of the branches
  Element o = Element::bf16;
  GateSource source = GateSource::sigmoid;
  int width = 8;   // elements that a thread loads at once: 8 or 1
  int lanes = 16;  // lanes that share a row of a head: 8, 16 or 32
  int chunks = 1;  // in a backward, the vectors that a thread has of a row of q

  static constexpr const char* type_name() { return "GateConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("q", c.q);
    visit("v", c.v);
    visit("o", c.o);
    visit("source", c.source);
    visit("width", c.width);
    visit("lanes", c.lanes);
    visit("chunks", c.chunks);
  }

  constexpr bool operator==(const GateConfig&) const = default;
  static constexpr int threads() { return 256; }
  constexpr int groups() const { return threads() / lanes; }
  /// Columns of a row that its lanes have at a time.
  constexpr int columns() const { return lanes * width; }
};

/// Rows of heads: of the queries, the three branches, O and the gates. Packed sequences count as one.
struct GateParams {
  const char* q;
  const char* weight;    // (heads, 3, d)
  const char* branches;  // (3, …O)
  const float* gates;    // (…, heads, 3)
  char* o;               // in a backward its gradient, which is read
  char* dq;              // this and what follows: only in a backward
  char* dbranches;
  float* dgates;
  float* partial_weights;  // (parts, heads, 3, d)
  Strides q_strides, branch_strides, o_strides, gate_strides, dq_strides, dbranch_strides, dgate_strides;
  i64 weight_strides[2];  // of heads and gates
  i64 branch, dbranch;    // between branches
  int batch;
  int all_rows;  // of all sequences; packed: capacity
  Divisor rows;  // of a sequence
  Divisor heads;
  const int* cu_seqlens;  // (b + 1); the last entry is the end of the packed rows; null: dense
  int d, dv;
  int part_rows;  // in a backward: rows that a thread block takes
};

/// Adds up the partial gradients of the gates' weights; a thread computes one element.
struct GateSumParams {
  const float* parts;
  float* sum;
  i64 strides[2];  // of heads and gates
  int count;       // heads · 3 · d
  int part_count;
  Divisor d;
};

}  // namespace tessera::cuda
