// SPDX-License-Identifier: Apache-2.0
// Chunked walks over whole sequences of linear attention (operations/linear_walks.h): the configuration and parameters
// of their kernel.
#pragma once

#include "shared/params.h"

namespace tessera::cuda {

struct ChunkConfig {
  Element type = Element::bf16;  // of x, y, z and out
  int x = 128;                   // dim of x and y: 64, 128 or 256
  int tile = 64;                 // of z: columns of the state that a block takes
  int chunk = 64;                // tokens
  int stages = 2;                // chunks in shared memory
  int terms = 1;                 // 16-bit numbers whose sum is a decayed y, in walks whose state is exact to fp32
  int blocks = 1;                // blocks of a multiprocessor for which the compiler leaves registers
  bool wgmma = false;            // products by wgmma (SM90), else by mma.sync

  static constexpr const char* type_name() { return "ChunkConfig"; }
  /// Calls visit(name, value) for every field, in the order of the struct. A kernel's source and name follow from this
  /// list; a field that it lacks does not compile (cuda/source/configuration_text.h).
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("type", c.type);
    visit("x", c.x);
    visit("tile", c.tile);
    visit("chunk", c.chunk);
    visit("stages", c.stages);
    visit("terms", c.terms);
    visit("blocks", c.blocks);
    visit("wgmma", c.wgmma);
  }

  constexpr bool operator==(const ChunkConfig&) const = default;
  /// Each of these warps has 16 tokens of a chunk.
  constexpr int output_warps() const { return chunk / 16; }
  /// Each of these warps has x / 4 rows of the state in registers.
  static constexpr int kUpdateWarps = 4;
  constexpr int threads() const { return (output_warps() + kUpdateWarps) * 32; }
  constexpr int stage_bytes() const { return chunk * (2 * x + tile) * bytes_of(type); }
  /// Bytes of the state as an operand, of this chunk and of the next.
  constexpr int state_bytes() const { return 2 * x * tile * bytes_of(type); }
  /// Bytes of the powers of the decay.
  static constexpr int kTableBytes = 1024;
  constexpr int smem_bytes() const { return kTableBytes + stages * stage_bytes() + state_bytes(); }
};

/// States in memory; a head of a state has elements (x, z).
struct ChunkStates {
  char* data;           // null: zeros, or not wanted
  i64 strides[4];       // of state, head, x and z
  i64 count;            // states; an index outside is none
  const void* indices;  // (b); null: sequence b has state b
  bool long_indices;    // int64, else int32
  bool is_bf16;         // else fp32
};

struct ChunkWalk {
  const void* x;
  const void* y;
  const void* z;
  void* out;
  Strides x_strides;
  Strides y_strides;
  Strides z_strides;
  Strides out_strides;
  ChunkStates first, last;
  bool backwards;  // from the last token to the first
  bool exact;      // the state is to be exact to fp32
  float y_scale, out_scale;
};

/// gridDim is (walks · tiles of z, heads, batch).
struct ChunkParams {
  ChunkWalk walks[3];
  int tiles;   // of z
  int seqlen;  // longest sequence
  int total;   // varlen: capacity in tokens
  const int* cu_seqlens;
  const float* slopes;  // (heads)
};

}  // namespace tessera::cuda
