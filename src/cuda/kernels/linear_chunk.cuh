// SPDX-License-Identifier: Apache-2.0
// Walks over whole sequences of linear attention (core/linear_walks.h), C tokens at a time, with a state S of (x, z):
//
//     out_i = out_scale · (a^(i+lag) · X_i S + Σ_{j≤i} a^(i−j) · y_scale · (X_i·Y_j) Z_j)
//     S     ← a^C · S + Σ_j a^(C−j−lag) · y_scale · Y_j ⊗ Z_j
//
// A block takes `tile` columns of z of one head of one sequence and walks it from end to end, so that S never leaves
// the multiprocessor: q, k, v are read and o is written once, where keeping a state for every chunk would move twice as
// much again. Both lines need S as it was before the chunk, and so two kinds of warps work beside each other:
//
//     output warps: 16 tokens each; S comes as a 16-bit operand from shared memory
//     update warps: x / 4 rows of S each, fp32 in registers; they leave the next chunk's operand in shared memory
//
// with one barrier a chunk, behind which the next chunks' copies are asked for. S is rounded where it meets X only.
// Where it is a result (`exact`), decayed Y is cut into parts that together are its fp32, and each chunk's sum begins at
// zero before it is added to S, because products are accumulated with truncation.
#pragma once

#include "cuda/policy/sequence.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "shared/linear_chunk.h"

namespace tessera::cuda {

template <ChunkConfig C>
struct LinearChunk {
  using XTile = SharedTile<C.chunk, C.x>;  // of y too
  using ZTile = SharedTile<C.chunk, C.tile>;
  using STile = SharedTile<C.x, C.tile>;
  static constexpr int kRowTiles = C.x / (16 * C.kUpdateWarps);  // of S, of an update warp
  static constexpr int kUnrolled = C.blocks > 1 ? 1 : 16;  // where registers are few, loops that cost little stay loops
  static constexpr float kMostSlope = 1000.0F;  // whose decay is 0 already; larger ones would make 0 · ∞

  const ChunkWalk& walk;
  float* power;  // shared: a^n for n = 0 … C.chunk
  u32 stages;    // shared: X, Y, Z of each
  u32 states;    // shared: two
  float slope;
  int lag;
  int length, first_token;
  int head, batch, first_column;

  static __device__ __forceinline__ void run(const ChunkParams& p) {
    extern __shared__ __align__(1024) char shared[];
    const int index = static_cast<int>(blockIdx.x) / p.tiles;
    const ChunkWalk& walk = p.walks[index];
    const int batch = static_cast<int>(blockIdx.z);
    const int head = static_cast<int>(blockIdx.y);
    const Extent extent = find_extent(p.cu_seqlens, nullptr, batch, p.seqlen, p.total);
    const u32 tiles = ptx::shared_address(shared + C.kTableBytes);
    const LinearChunk block{walk,
                            reinterpret_cast<float*>(shared),
                            tiles,
                            tiles + C.stages * C.stage_bytes(),
                            fminf(p.slopes[head], kMostSlope),
                            walk.backwards ? 0 : 1,
                            extent.length,
                            extent.first,
                            head,
                            batch,
                            (static_cast<int>(blockIdx.x) - index * p.tiles) * C.tile};
    block.work();
  }

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ __forceinline__ int lane() { return thread() % 32; }
  __device__ __forceinline__ u32 stage(int chunk) const { return stages + chunk % C.stages * C.stage_bytes(); }
  __device__ __forceinline__ u32 state(int chunk) const { return states + chunk % 2 * STile::bytes; }

  __device__ __forceinline__ void work() const {
    for (int n = thread(); n <= C.chunk; n += C.threads()) power[n] = expf(-slope * static_cast<float>(n));
    const int chunks = divide_up(length, C.chunk);
#pragma unroll
    for (int i = 0; i < C.stages - 1; ++i) load(i);
    if (thread() < C.output_warps() * 32) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        begin(chunk);
        outputs(chunk);
      }
    } else {
      update_all(chunks);
    }
  }

  /// The chunk is there, what the chunk before was computed from is free.
  __device__ __forceinline__ void begin(int chunk) const {
    ptx::cp_async_wait<C.stages - 2>();
    __syncthreads();
    load(chunk + C.stages - 1);
  }

  // ---- copies

  /// Elements from the first of the tensor to this head's row of the walk's step 0, and between steps.
  __device__ __forceinline__ i64 first_row(const Strides& s) const {
    return batch * s.batch + head * s.head + (first_token + (walk.backwards ? length - 1 : 0)) * s.row;
  }
  __device__ __forceinline__ i64 row_step(const Strides& s) const { return walk.backwards ? -s.row : s.row; }

  /// Asks for a chunk; rows past the sequence are zeros.
  __device__ __forceinline__ void load(int chunk) const {
    const int first = chunk * C.chunk;
    if (first < length) {
      const u32 to = stage(chunk);
      copy_rows<XTile>(to, walk.x, walk.x_strides, 0, first);
      copy_rows<XTile>(to + XTile::bytes, walk.y, walk.y_strides, 0, first);
      copy_rows<ZTile>(to + 2 * XTile::bytes, walk.z, walk.z_strides, first_column, first);
    }
    ptx::cp_async_commit();
  }

  template <class Tile>
  __device__ __forceinline__ void copy_rows(u32 to, const void* from, const Strides& s, int column, int first) const {
    constexpr int pieces = Tile::columns / 8;  // of a row, 16 bytes each
    constexpr int rows = C.threads() / pieces;
    const int piece = thread() % pieces;
    const i64 step = row_step(s) * 2;
    const char* base = static_cast<const char*>(from) + (first_row(s) + column + piece * 8) * 2;
#pragma unroll(kUnrolled)
    for (int i = 0; i < divide_up(C.chunk, rows); ++i) {
      const int row = thread() / pieces + i * rows;
      if (C.chunk % rows != 0 && row >= C.chunk) break;
      const bool valid = first + row < length;
      ptx::cp_async_16_or_zeros(to + Tile::at(row, piece), valid ? base + (first + row) * step : base, valid);
    }
  }

  // ---- outputs

  __device__ __forceinline__ void outputs(int chunk) const {
    const int warp = thread() / 32;
    const u32 x = stage(chunk);
    const u32 y = keys_address<XTile>(x + XTile::bytes, lane());
    const u32 s = values_address<STile>(state(chunk), lane());
    const u32 rows = rows_address<XTile>(x, warp * 16, lane());
    Accumulator<1, C.tile / 8> out;
    Accumulator<1, C.chunk / 8> scores;
    out.clear();
    scores.clear();
#pragma unroll
    for (int k = 0; k < C.x / 16; ++k) {
      u32 a[1][4];
      load_rows<XTile>(a, rows, k);
      multiply_values<C.type, STile>(out, a, s, k);
#pragma unroll
      for (int n = 0; n < C.chunk / 16; ++n) {
        if (n > warp) break;  // later tokens
        u32 b[4];
        ptx::ldmatrix_x4(b, XTile::chunk_pair(y, k) + XTile::rows_below(n * 16));
        ptx::mma_m16n8k16<C.type>(scores.tile[0][2 * n], a[0], b[0], b[1]);
        ptx::mma_m16n8k16<C.type>(scores.tile[0][2 * n + 1], a[0], b[2], b[3]);
      }
    }
    const int row = warp * 16 + lane() / 4;
    const float upper = walk.out_scale * power[row + lag];
    const float lower = walk.out_scale * power[row + 8 + lag];
#pragma unroll
    for (int n = 0; n < C.tile / 8; ++n) {
      out.tile[0][n][0] *= upper, out.tile[0][n][1] *= upper;
      out.tile[0][n][2] *= lower, out.tile[0][n][3] *= lower;
    }
    add_tokens(out, scores, x + 2 * XTile::bytes, warp);
    write(out, x, chunk, warp);
  }

  /// out += what the chunk's own tokens bring.
  __device__ __forceinline__ void add_tokens(Accumulator<1, C.tile / 8>& out, Accumulator<1, C.chunk / 8>& scores,
                                             u32 z, int warp) const {
    const float factor = walk.y_scale * walk.out_scale;
    const float slope2 = slope * kLog2E;
    const int distance = warp * 16 + lane() / 4 - lane() % 4 * 2;  // of the lane's row and the first of its columns
    const u32 values = values_address<ZTile>(z, lane());
#pragma unroll
    for (int n = 0; n < C.chunk / 16; ++n) {
      if (n > warp) break;
      u32 p[1][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&c)[4] = scores.tile[0][2 * n + half];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int apart = distance + i / 2 * 8 - (n * 16 + half * 8 + i % 2);
          const float weight = ptx::exp2(-slope2 * static_cast<float>(apart)) * factor;
          c[i] = apart >= 0 ? c[i] * weight : 0.0F;
        }
        p[0][2 * half] = ptx::pack<C.type>(c[0], c[1]);
        p[0][2 * half + 1] = ptx::pack<C.type>(c[2], c[3]);
      }
      multiply_values<C.type, ZTile>(out, p, values, n);
    }
  }

  /// Through the warp's own rows of X, which it has read, to whole lines of memory.
  __device__ __forceinline__ void write(const Accumulator<1, C.tile / 8>& out, u32 x, int chunk, int warp) const {
    const int row = warp * 16 + lane() / 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < C.tile / 8; ++n) {
      const u32 column = lane() % 4 * 4;
      ptx::store_shared_4(x + XTile::at(row, n) + column, ptx::pack<C.type>(out.tile[0][n][0], out.tile[0][n][1]));
      ptx::store_shared_4(x + XTile::at(row + 8, n) + column, ptx::pack<C.type>(out.tile[0][n][2], out.tile[0][n][3]));
    }
    __syncwarp();
    constexpr int pieces = C.tile / 8;
    const int piece = lane() % pieces;
    const i64 step = row_step(walk.out_strides) * 2;
    char* base = static_cast<char*>(walk.out) + (first_row(walk.out_strides) + first_column + piece * 8) * 2;
#pragma unroll
    for (int i = 0; i < 16; i += 32 / pieces) {
      const int at = warp * 16 + i + lane() / pieces;
      u32 bits[4];
      ptx::load_shared_16(bits, x + XTile::at(at, piece));
      if (chunk * C.chunk + at < length) ptx::store_16(base + (chunk * C.chunk + at) * step, bits);
    }
  }

  // ---- updates

  using State = Accumulator<kRowTiles, C.tile / 8>;
  static __device__ __forceinline__ int update_warp() { return thread() / 32 - C.output_warps(); }
  /// Row and column of element i of tile (m, n).
  static __device__ __forceinline__ int row_of(int m, int i) {
    return (update_warp() * kRowTiles + m) * 16 + lane() / 4 + i / 2 * 8;
  }
  static __device__ __forceinline__ int column_of(int n, int i) { return n * 8 + lane() % 4 * 2 + i % 2; }

  __device__ __forceinline__ void update_all(int chunks) const {
    State s;
    read(s, walk.first);
    leave(s, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      begin(chunk);
      if (C.parts > 1 && walk.exact) {
        update<C.parts>(s, chunk);
      } else {
        update<1>(s, chunk);
      }
      leave(s, chunk + 1);
    }
    write_state(s);
  }

  template <int parts>
  __device__ __forceinline__ void update(State& s, int chunk) const {
    const u32 y = keys_address<XTile>(stage(chunk) + XTile::bytes, lane());
    const u32 z = values_address<ZTile>(stage(chunk) + 2 * XTile::bytes, lane());
    const int count = min(length - chunk * C.chunk, C.chunk);
    const float decay = power[count];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Accumulator<1, C.tile / 8> sum;
      sum.clear();
      const u32 keys = XTile::chunk_pair(y, update_warp() * kRowTiles + m);
#pragma unroll(kUnrolled)
      for (int t = 0; t < C.chunk / 16; ++t) {
        u32 a[parts][4];
        decayed<parts>(a, keys + XTile::rows_below(t * 16), count - lag - (t * 16 + lane() % 4 * 2));
#pragma unroll
        for (int n = 0; n < C.tile / 16; ++n) {
          u32 b[4];
          ptx::ldmatrix_x4_transposed(b, ZTile::chunk_pair(z, n) + ZTile::rows_below(t * 16));
#pragma unroll
          for (int part = 0; part < parts; ++part) {
            ptx::mma_m16n8k16<C.type>(sum.tile[0][2 * n], a[part], b[0], b[1]);
            ptx::mma_m16n8k16<C.type>(sum.tile[0][2 * n + 1], a[part], b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < C.tile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.tile[m][n][i] = decay * s.tile[m][n][i] + sum.tile[0][n][i];
      }
    }
  }

  /// Yᵀ of 16 tokens, each times its decay; `exponent` is that of the lane's first. Rows past the sequence are zeros
  /// and may have any.
  template <int parts>
  __device__ __forceinline__ void decayed(u32 (&a)[parts][4], u32 keys, int exponent) const {
    u32 bits[4];
    ptx::ldmatrix_x4_transposed(bits, keys);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = exponent - i / 2 * 8;
      float low;
      float high;
      ptx::unpack<C.type>(bits[i], low, high);
      low *= walk.y_scale * power[max(at, 0)];
      high *= walk.y_scale * power[max(at - 1, 0)];
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        a[part][i] = ptx::pack<C.type>(low, high);
        if (part + 1 == parts) break;
        float rounded_low;
        float rounded_high;
        ptx::unpack<C.type>(a[part][i], rounded_low, rounded_high);
        low -= rounded_low;
        high -= rounded_high;
      }
    }
  }

  /// S as the operand of a chunk.
  __device__ __forceinline__ void leave(const State& s, int chunk) const {
    const u32 to = state(chunk);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C.tile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          ptx::store_shared_4(to + STile::at(row_of(m, i), n) + lane() % 4 * 4,
                              ptx::pack<C.type>(s.tile[m][n][i], s.tile[m][n][i + 1]));
        }
      }
    }
  }

  // ---- states in memory

  /// This head of the sequence's state, or null.
  __device__ __forceinline__ char* find(const ChunkStates& states) const {
    if (states.data == nullptr) return nullptr;
    i64 index = batch;
    if (states.indices != nullptr) {
      index = states.long_indices ? static_cast<const i64*>(states.indices)[batch]
                                  : static_cast<const int*>(states.indices)[batch];
    }
    if (index < 0 || index >= states.count) return nullptr;
    const i64 at = index * states.strides[0] + head * states.strides[1] + first_column * states.strides[3];
    return states.data + at * (states.is_bf16 ? 2 : 4);
  }

  __device__ __forceinline__ void read(State& s, const ChunkStates& states) const {
    const char* from = find(states);
    s.clear();
    if (from == nullptr) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C.tile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i64 at = row_of(m, i) * states.strides[2] + column_of(n, i) * states.strides[3];
          if (states.is_bf16) {
            s.tile[m][n][i] = __uint_as_float(static_cast<u32>(reinterpret_cast<const unsigned short*>(from)[at]) << 16U);
          } else {
            s.tile[m][n][i] = reinterpret_cast<const float*>(from)[at];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void write_state(const State& s) const {
    const ChunkStates& states = walk.last;
    char* to = find(states);
    if (to == nullptr) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C.tile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i64 at = row_of(m, i) * states.strides[2] + column_of(n, i) * states.strides[3];
          if (states.is_bf16) {
            reinterpret_cast<unsigned short*>(to)[at] =
                static_cast<unsigned short>(ptx::pack<Element::bf16>(s.tile[m][n][i], 0.0F));
          } else {
            reinterpret_cast<float*>(to)[at] = s.tile[m][n][i];
          }
        }
      }
    }
  }
};

}  // namespace tessera::cuda
