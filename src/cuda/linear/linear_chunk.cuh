// SPDX-License-Identifier: Apache-2.0
// Walks over whole sequences of linear attention (operations/linear_walks.h), C tokens at a time, with a state S of (x,
// z):
//
//     out_i = out_scale · (a^(i+lag) · X_i S + Σ_{j≤i} a^(i−j) · y_scale · (X_i·Y_j) Z_j)
//     S     ← a^C · S + Σ_j a^(C−j−lag) · y_scale · Y_j ⊗ Z_j
//
// Here a = exp(−slope). A block takes `tile` columns of z of one head of one sequence and walks the whole sequence, so
// that S never leaves the multiprocessor. Z is read and `out` is written once, X and Y are read once for each tile of
// z; to store a state for every chunk would add about twice this traffic. Both lines need S as it was before the chunk.
// So two kinds of warps run concurrently:
//
//     output warps: each has 16 tokens, and reads S as a 16-bit operand from shared memory
//     update warps: each has x / 4 rows of S as fp32 in registers, and stores the next chunk's operand in shared memory
//
// They meet at one barrier per chunk, after which copies of a later chunk are issued. S is rounded only as the operand
// of X S. In `exact` walks, in which S is an fp32 result, decayed Y is split into 16-bit terms that together have the
// precision of fp32. Each chunk's sum begins at zero and is then added to S, because tensor cores accumulate with
// truncation.
#pragma once

#include "cuda/attention/kv/sequence.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/tile/gemm_mma.cuh"
#include "shared/linear_chunk.h"

namespace tessera::cuda {

/// Computes both lines, by mma.sync (linear_chunk_mma.cuh) or wgmma (linear_chunk_wgmma.cuh).
template <ChunkConfig C, bool wgmma = C.wgmma>
struct ChunkProducts;

template <ChunkConfig C>
struct LinearChunk {
  using XTile = SharedTile<C.type, C.chunk, C.x>;  // for y too
  using ZTile = SharedTile<C.type, C.chunk, C.tile>;
  using STile = SharedTile<C.type, C.x, C.tile>;
  static constexpr int kRowTiles = C.x / (16 * C.kUpdateWarps);  // row tiles of S per update warp
  using State = Accumulator<kRowTiles, C.tile / 8>;
  using Out = Accumulator<1, C.tile / 8>;
  using Scores = Accumulator<1, C.chunk / 8>;
  static constexpr int kChunkBarrier = 2;                  // the output warps use barrier 1 with wgmma
  static constexpr int kUnrolled = C.blocks > 1 ? 1 : 16;  // with few registers, cheap loops are not unrolled
  static constexpr float kMostSlope = 1000.0F;  // its decay is 0 already; an infinite slope would make 0 · ∞

  const ChunkWalk& walk;
  float* power;  // shared: a^n for n = 0 … C.chunk
  u32 stages;    // shared: X, Y and Z of each stage
  u32 states;    // shared: two operands S
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
    __syncthreads();
    const int chunks = divide_up(length, C.chunk);
#pragma unroll
    for (int i = 0; i < C.stages - 1; ++i) load(i);
    if (thread() < C.output_warps() * 32) {
      ChunkProducts<C>::outputs(*this, chunks);
    } else {
      update_all(chunks);
    }
  }

  /// Waits until the chunk is loaded and all warps have finished the chunk before. prefetch() then may reuse the stage
  /// of the latter.
  __device__ __forceinline__ void begin(int chunk) const {
    ptx::cp_async_wait<C.stages - 2>();
    if constexpr (C.wgmma) ptx::fence_async_proxy();  // before wgmma reads the copies and the stored S
    ptx::barrier_sync_of_branches(kChunkBarrier, C.threads());
  }
  __device__ __forceinline__ void prefetch(int chunk) const { load(chunk + C.stages - 1); }

  // ---- copies

  /// Offset in elements of this head's row of the first token of the walk. row_step() is the distance to the next.
  __device__ __forceinline__ i64 first_row(const Strides& s) const {
    return batch * s.batch + head * s.head + (first_token + (walk.backwards ? length - 1 : 0)) * s.row;
  }
  __device__ __forceinline__ i64 row_step(const Strides& s) const { return walk.backwards ? -s.row : s.row; }

  /// Issues the copies of a chunk; rows past the end of the sequence are filled with zeros.
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
    constexpr int pieces = Tile::columns / Tile::chunk_elements;  // of a row
    constexpr int rows = C.threads() / pieces;
    const int piece = thread() % pieces;
    const i64 step = row_step(s) * bytes_of(C.type);
    const int row = thread() / pieces;
    const int valid = min(length - first, C.chunk);
    const char* base =
        static_cast<const char*>(from) + (first_row(s) + column + piece * Tile::chunk_elements) * bytes_of(C.type);
    const char* at = base + (first + row) * step;
#pragma unroll(kUnrolled)
    for (int i = 0; i < divide_up(C.chunk, rows); ++i, at += rows * step) {
      const int below = row + i * rows;
      if (C.chunk % rows != 0 && below >= C.chunk) break;
      ptx::cp_async_16_or_zeros(to + Tile::at(below, piece), below < valid ? at : base, below < valid);
    }
  }

  // ---- outputs

  /// Multiplies X S, which is in `out`, by each token's power of the decay and by out_scale.
  __device__ __forceinline__ void decay(Out& out) const {
    const int row = thread() / 32 * 16 + lane() / 4;
    const float upper = walk.out_scale * power[row + lag];
    const float lower = walk.out_scale * power[row + 8 + lag];
#pragma unroll
    for (int n = 0; n < C.tile / 8; ++n) {
      out.tile[0][n][0] *= upper, out.tile[0][n][1] *= upper;
      out.tile[0][n][2] *= lower, out.tile[0][n][3] *= lower;
    }
  }

  /// The factor (decay and scales) of this lane's score with the chunk's token of column (n, i); 0 for later tokens.
  __device__ __forceinline__ float weight(int n, int i) const {
    const int apart = thread() / 32 * 16 + lane() / 4 + i / 2 * 8 - (n * 8 + lane() % 4 * 2 + i % 2);
    return apart >= 0 ? power[apart] * (walk.y_scale * walk.out_scale) : 0.0F;
  }

  /// Writes whole lines of memory. Outputs pass through the warp's own rows of X in shared memory, which are free now.
  __device__ __forceinline__ void write(const Out& out, u32 x, int chunk) const {
    const int warp = thread() / 32;
    const int row = warp * 16 + lane() / 4;
#pragma unroll
    for (int n = 0; n < C.tile / 8; ++n) {
      const u32 column = lane() % 4 * 4;
      ptx::store_shared_4(x + XTile::at(row, n) + column, ptx::pack<C.type>(out.tile[0][n][0], out.tile[0][n][1]));
      ptx::store_shared_4(x + XTile::at(row + 8, n) + column, ptx::pack<C.type>(out.tile[0][n][2], out.tile[0][n][3]));
    }
    __syncwarp();
    constexpr int pieces = C.tile / elements_of_chunk(C.type);
    const int piece = lane() % pieces;
    const i64 step = row_step(walk.out_strides) * bytes_of(C.type);
    char* base = static_cast<char*>(walk.out) +
                 (first_row(walk.out_strides) + first_column + piece * elements_of_chunk(C.type)) * bytes_of(C.type);
#pragma unroll
    for (int i = 0; i < 16; i += 32 / pieces) {
      const int at = warp * 16 + i + lane() / pieces;
      u32 bits[4];
      ptx::load_shared_16(bits, x + XTile::at(at, piece));
      if (chunk * C.chunk + at < length) ptx::store_16(base + (chunk * C.chunk + at) * step, bits);
    }
  }

  // ---- updates

  static __device__ __forceinline__ int update_warp() { return thread() / 32 - C.output_warps(); }
  static __device__ __forceinline__ int row_tile(int m) { return m * C.kUpdateWarps + update_warp(); }
  /// Row and column of element i of tile (m, n).
  static __device__ __forceinline__ int row_of(int m, int i) { return row_tile(m) * 16 + lane() / 4 + i / 2 * 8; }
  static __device__ __forceinline__ int column_of(int n, int i) { return n * 8 + lane() % 4 * 2 + i % 2; }

  __device__ __forceinline__ void update_all(int chunks) const {
    State s;
    read(s, walk.first);
    leave(s, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      begin(chunk);
      prefetch(chunk);
      if (C.terms > 1 && walk.exact) {
        ChunkProducts<C>::template update<C.terms>(*this, s, chunk);
      } else {
        ChunkProducts<C>::template update<1>(*this, s, chunk);
      }
      leave(s, chunk + 1);
    }
    write_state(s);
  }

  /// Loads Yᵀ of 16 tokens, tile `t` of a chunk of `count` tokens, multiplies each token by its decay and y_scale, and
  /// splits the products into `terms` A operands. `keys`: this lane's address of Y's first 16 tokens. Rows past the end
  /// of the sequence are zeros, so their decay does not matter.
  template <int terms>
  __device__ __forceinline__ void decayed(u32 (&a)[terms][4], u32 keys, int t, int count) const {
    u32 bits[4];
    ptx::ldmatrix_x4_transposed(bits, keys + XTile::rows_below(t * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = count - lag - (t * 16 + lane() % 4 * 2) - i / 2 * 8;
      float low;
      float high;
      ptx::unpack<C.type>(bits[i], low, high);
      low *= walk.y_scale * power[max(at, 0)];
      high *= walk.y_scale * power[max(at - 1, 0)];
#pragma unroll
      for (int term = 0; term < terms; ++term) {
        a[term][i] = ptx::pack<C.type>(low, high);
        if (term + 1 == terms) break;
        float rounded_low;
        float rounded_high;
        ptx::unpack<C.type>(a[term][i], rounded_low, rounded_high);
        low -= rounded_low;
        high -= rounded_high;
      }
    }
  }

  /// S = decay · S + sum, for row tile m.
  static __device__ __forceinline__ void add(State& s, int m, float decay, const Out& sum) {
#pragma unroll
    for (int n = 0; n < C.tile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.tile[m][n][i] = decay * s.tile[m][n][i] + sum.tile[0][n][i];
    }
  }

  /// Stores S to shared memory as the operand of a chunk.
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

  /// Address of this block's columns in the head's state of the sequence; null if there is none.
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
            s.tile[m][n][i] =
                __uint_as_float(static_cast<u32>(reinterpret_cast<const unsigned short*>(from)[at]) << 16U);
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
