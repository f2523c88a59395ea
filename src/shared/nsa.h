// SPDX-License-Identifier: Apache-2.0
// Compressed keys of native sparse attention (docs/nsa.md): the configurations and parameters of the kernels that
// compute them and their gradients.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

/// Where the sequences of tokens are, and how they are compressed.
struct CompressionParams {
  int batch;
  int seqlen;             // longest sequence
  int total;              // packed: capacity in tokens
  int capacity;           // packed: rows of compressed keys
  const int* cu_seqlens;  // (b + 1); null: dense
  int length;
  Divisor stride;
};

/// The rows of one side: K or V.
struct HeadRows {
  char* data;
  Strides strides;
};

/// Computes the means of blocks of tokens.
struct PoolConfig {
  Element type = Element::bf16;    // of tokens
  Element output = Element::bf16;  // of means
  int width = 8;                   // elements that a thread loads at once: 8 or 1

  static constexpr const char* type_name() { return "PoolConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("output", c.output);
    visit("width", c.width);
  }

  constexpr bool operator==(const PoolConfig&) const = default;
  /// Each warp sums a part of a block's tokens.
  static constexpr int kWarps = 4;
  static constexpr int threads() { return kWarps * 32; }
};

struct PoolSide {
  HeadRows tokens;
  HeadRows pooled;
  int dim;
};

/// gridDim is (blocks, columns of all heads / (32 · width), sequences · sides).
struct PoolParams {
  CompressionParams compression;
  PoolSide side[2];
  int sides;
  int heads;
  int* cu_blocks;  // (b + 1), or null
};

/// Computes the gradients of tokens from those of means.
struct SpreadConfig {
  Element type = Element::bf16;    // of the means' gradients
  Element output = Element::bf16;  // of the tokens'
  int width = 8;

  static constexpr const char* type_name() { return "SpreadConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("output", c.output);
    visit("width", c.width);
  }

  constexpr bool operator==(const SpreadConfig&) const = default;
  static constexpr int kWarps = 4;
  static constexpr int kTokens = 8;  // of a warp
  static constexpr int threads() { return kWarps * 32; }
  static constexpr int tokens() { return kWarps * kTokens; }
};

/// Multiplies the rows of a head by the head's matrix.
struct ProjectConfig {
  Element type = Element::fp32;    // of the rows
  Element matrix = Element::bf16;  // of the matrix
  Element output = Element::bf16;
  bool transposed = false;  // multiplies by the transpose

  static constexpr const char* type_name() { return "ProjectConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("matrix", c.matrix);
    visit("output", c.output);
    visit("transposed", c.transposed);
  }

  constexpr bool operator==(const ProjectConfig&) const = default;
  static constexpr int kRows = 16;  // of a block of threads
  static constexpr int threads() { return 128; }
  static constexpr int smem_bytes(int dim) { return kRows * round_up(dim, 4) * static_cast<int>(sizeof(float)); }
};

struct ProjectSide {
  HeadRows from;
  HeadRows to;
  const char* matrix;     // (heads, dim, dim)
  i64 matrix_strides[2];  // of heads and rows
  int dim;
};

/// gridDim is (blocks / rows of a block of threads, heads, sequences · sides).
struct ProjectParams {
  CompressionParams compression;
  ProjectSide side[2];
  int sides;
};

/// Computes the gradients of the matrices: Σ over all blocks of meanᵀ · gradient.
struct MatrixGradientConfig {
  Element type = Element::bf16;  // of gradients of compressed keys; means are fp32

  static constexpr const char* type_name() { return "MatrixGradientConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
  }

  constexpr bool operator==(const MatrixGradientConfig&) const = default;
  static constexpr int kTile = 32;  // rows and columns of the matrix for a thread block; compressed blocks at a time
  static constexpr int threads() { return 256; }
};

struct MatrixGradientSide {
  HeadRows means;
  HeadRows gradients;
  float* matrix;          // (heads, dim, dim)
  i64 matrix_strides[2];  // of heads and rows
  int dim;
};

/// gridDim is (tiles of rows · tiles of columns, heads, sides).
struct MatrixGradientParams {
  CompressionParams compression;
  MatrixGradientSide side[2];
  Divisor blocks;  // dense: of a sequence
};

}  // namespace tessera::cuda
