// SPDX-License-Identifier: Apache-2.0
// A step of linear attention on a pool of states (Katharopoulos et al. 2020; Qin et al. 2024, Lightning Attention-2):
//
//     S ← exp(−slope) · S + k ⊗ v        o = (scale · q) · S
//
// The step is bound by memory: the state is read once and written once, which at D = 128 and fp32 is 128 KB a head,
// with 1 KB of everything else and 5 operations for 8 bytes. So each thread issues all of its 16-byte loads before it
// uses any result, and keeps its part of the state in registers for all tokens of the step. To read its share of 4.8
// TB/s at a latency of 0.75 µs, a multiprocessor needs 27 KB in flight (46 KB if 78 of them share the bandwidth). More
// is worse: an in-place pass over memory runs at 4.2 TB/s with 32 KB in flight and at 3.9 with 128 KB
// (docs/experiments/linear-decode.md), so blocks are small. With a single token and rows of v a block has 4 KB of the
// state, and each thread loads its own q, k and v into registers, so that the load of the state waits only for that of
// the slot. With several tokens a block has 16 KB, and its threads share q, k and v in shared memory.
//
// A block takes `tile` dims of v of one head of one sequence, so that blocks are independent:
//   rows of v (K contiguous): lanes lie along K, and shuffles sum over them, for all rows of a warp together;
//   rows of k (V contiguous): lanes lie along V, and sums go over a thread's rows, then lanes, then warps.
// With splits, a block takes only a part of k's dims, and linear_sum.cuh adds the outputs of the parts.
#pragma once

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/row_vector.cuh"
#include "cuda/tile/state_vector.cuh"
#include "shared/linear.h"

namespace tessera::cuda {

/// Sums each of `count` values over `lanes` adjacent lanes. Every exchange halves the number of values that a lane
/// still has. Afterwards x[0] of lane l is the sum of value l / (lanes / count).
template <int lanes, int count>
__device__ __forceinline__ void sum_lanes(float* x) {
  static_assert(count <= lanes);
  if constexpr (lanes > 1) {
    constexpr int half = lanes / 2;
    if constexpr (count > 1) {
      const bool upper = (threadIdx.x & half) != 0;
#pragma unroll
      for (int i = 0; i < count / 2; ++i) {
        const float kept = upper ? x[i + count / 2] : x[i];
        const float sent = upper ? x[i] : x[i + count / 2];
        x[i] = kept + __shfl_xor_sync(0xffffffffU, sent, half);
      }
      sum_lanes<half, count / 2>(x);
    } else {
      x[0] += __shfl_xor_sync(0xffffffffU, x[0], half);
      sum_lanes<half, 1>(x);
    }
  }
}

template <LinearConfig C>
struct LinearDecode {
  using State = StateVector<C.state>;
  static constexpr int kWidth = C.width();
  static constexpr int kRows = C.rows_a_thread();
  static constexpr int kLoads = C.loads_a_row();
  static constexpr int kRowsApart = 32 / C.lanes();  // distance of a thread's rows; rows of a warp are adjacent
  static_assert(C.is_even());

  const LinearParams& p;
  float* q;  // shared: (tokens, d) scaled, (tokens, d), (tokens, tile), (tokens, warps, tile)
  float* k;
  float* v;
  float* sums;
  int head, batch;

  static __device__ __forceinline__ void run(const LinearParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    extern __shared__ float shared[];
    float* k = shared + p.tokens * C.d;
    float* v = k + p.tokens * C.d;
    const LinearDecode step{
        p, shared, k, v, v + p.tokens * C.tile, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
    if constexpr (C.one_token) {
      step.take_token();
    } else {
      step.take_tokens();
    }
  }

  /// The parameters for this block's part of the dims of k.
  static __device__ __forceinline__ LinearParams key_part(const LinearParams& whole) {
    const int part = static_cast<int>(blockIdx.x % C.parts);
    const int first = part * C.d;
    LinearParams p = whole;
    p.q = static_cast<const char*>(p.q) + first * bytes_of(C.q);
    p.k = static_cast<const char*>(p.k) + first * bytes_of(C.k);
    p.state = static_cast<char*>(p.state) + first * (C.rows == StateRows::v ? 1 : p.row_stride) * bytes_of(C.state);
    p.o = static_cast<char*>(p.o) + part * p.o_part * bytes_of(C.o);
    return p;
  }

  /// The slot from which the state of sequence `batch` is read, and the one to which it is written.
  __device__ __forceinline__ i64 source() const { return ptx::load_index(p.state_slots, p.long_state_slots, batch); }
  __device__ __forceinline__ i64 target(i64 source) const {
    return p.dest_slots == nullptr ? source : ptx::load_index(p.dest_slots, p.long_dest_slots, batch);
  }
  __device__ __forceinline__ bool has(i64 slot) const { return slot >= 0 && slot < p.slots; }

  static __device__ __forceinline__ int first_column() { return static_cast<int>(blockIdx.x / C.parts) * C.tile; }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  /// A thread's first row in the block's part of the state, and its first column.
  static __device__ __forceinline__ int row() {
    return thread() / 32 * (kRows * kRowsApart) + thread() % 32 / C.lanes();
  }
  static __device__ __forceinline__ int column() { return thread() % C.lanes() * kWidth; }

  /// This thread's first element in the state of `slot`.
  __device__ __forceinline__ char* part_of(i64 slot) const { return part() + slot * bytes_between_slots(); }
  __device__ __forceinline__ char* part() const {
    const int row_of_v = C.rows == StateRows::v ? first_column() : 0;
    const int column_of_v = C.rows == StateRows::v ? 0 : first_column();
    const i64 at = head * p.head_stride + (row_of_v + row()) * p.row_stride + column_of_v + column();
    return static_cast<char*>(p.state) + at * bytes_of(C.state);
  }
  __device__ __forceinline__ i64 bytes_between_slots() const { return p.slot_stride * bytes_of(C.state); }

  /// Distance between rows of one thread.
  __device__ __forceinline__ i64 bytes_between_rows() const { return kRowsApart * p.row_stride * bytes_of(C.state); }
  static __device__ __forceinline__ void read_state(u32 (&bits)[kRows * kLoads][4], const char* from, i64 row_step) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        ptx::load_once_16(bits[r * kLoads + l], from + l * (C.lanes() * 16));
      }
      from += row_step;
    }
  }
  __device__ __forceinline__ void write_state(const State (&s)[kRows * kLoads], i64 slot, i64 row_step) const {
    char* to = part_of(slot);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        if constexpr (C.stochastic) {
          s[r * kLoads + l].store(to + l * (C.lanes() * 16), draws(slot, r, l));
        } else {
          s[r * kLoads + l].store(to + l * (C.lanes() * 16));
        }
      }
      to += row_step;
    }
  }

  /// The random numbers for the elements of load l of a thread's row r in the state of `slot`.
  __device__ __forceinline__ Philox draws(i64 slot, int r, int l) const {
    constexpr bool of_v = C.rows == StateRows::v;
    const int columns = of_v ? C.d : static_cast<int>(gridDim.x) * C.tile;
    const int at_row = (of_v ? first_column() : 0) + row(r);
    const int at_column = (of_v ? 0 : first_column()) + column() + l * (C.lanes() * kWidth);
    const u64 seed = p.seed_at != nullptr ? *p.seed_at : p.seed;
    const u64 offset = p.offset_at != nullptr ? *p.offset_at : p.offset;
    return {static_cast<u32>((at_row * columns + at_column) / 8),
            static_cast<u32>(head),
            static_cast<u32>(slot),
            static_cast<u32>(offset),
            static_cast<u32>(seed),
            static_cast<u32>(seed >> 32) ^ static_cast<u32>(offset >> 32)};
  }

  /// The elements of a token that a thread with rows of v needs.
  struct Token {
    float q[kLoads][kWidth], k[kLoads][kWidth], v[kRows];
  };

  __device__ __forceinline__ void take_tokens() const {
    const i64 slot = source();
    if (!has(slot)) return write_zeros();
    const i64 row_step = bytes_between_rows();
    u32 bits[kRows * kLoads][4];
    read_state(bits, part_of(slot), row_step);
    load_tokens();
    const float decay = expf(-p.slopes[head]);
    State s[kRows * kLoads];
#pragma unroll
    for (int i = 0; i < kRows * kLoads; ++i) s[i].widen(bits[i]);
    __syncthreads();
    for (int t = 0; t < p.tokens; ++t) {
      if constexpr (C.rows == StateRows::v) {
        float o[kRows] = {};
        rows_of_v(s, o, decay, read_token(t));
        put_rows(o, t);
      } else {
        rows_of_k(s, decay, t);
      }
    }
    const i64 to = target(slot);
    if (has(to)) write_state(s, to, row_step);
    if constexpr (C.rows == StateRows::k) sum_warps();
  }

  /// The order hides latencies: addresses are computed while the slot is loaded, the state is loaded before q, k and v,
  /// and the new state is stored before the sums over lanes.
  __device__ __forceinline__ void take_token() const {
    const i64 slot = source();
    const char* from = part();
    const char* at_q = token_at<C.q>(p.q, p.q_strides, column());
    const char* at_k = token_at<C.k>(p.k, p.k_strides, column());
    const char* at_v = token_at<C.v>(p.v, p.v_strides, first_column() + row());
    ptx::known_here(from);
    ptx::known_here(at_q);
    ptx::known_here(at_k);
    ptx::known_here(at_v);
    if (!has(slot)) return write_zeros();
    const i64 row_step = bytes_between_rows();
    u32 bits[kRows * kLoads][4];
    read_state(bits, from + slot * bytes_between_slots(), row_step);
    Token token;
    load_token(token, at_q, at_k, at_v);
    const float decay = expf(-p.slopes[head]);
    const i64 to = target(slot);
    State s[kRows * kLoads];
#pragma unroll
    for (int i = 0; i < kRows * kLoads; ++i) s[i].widen(bits[i]);
    float o[kRows] = {};
    rows_of_v(s, o, decay, token);
    if (has(to)) write_state(s, to, row_step);
    put_rows(o, 0);
  }

  __device__ __forceinline__ void load_tokens() const {
    constexpr int row_steps = C.d / 8;
    constexpr int part_steps = C.tile / 8;
    constexpr int steps = 2 * row_steps + part_steps;
    for (int i = thread(); i < p.tokens * steps; i += C.threads()) {
      const int t = i / steps;
      const int step = i - t * steps;
      if (step < row_steps) {
        load<C.q>(q + t * C.d + step * 8, token_at<C.q>(p.q, p.q_strides, step * 8, t), p.scale);
      } else if (step < 2 * row_steps) {
        const int at = (step - row_steps) * 8;
        load<C.k>(k + t * C.d + at, token_at<C.k>(p.k, p.k_strides, at, t));
      } else {
        const int at = (step - 2 * row_steps) * 8;
        load<C.v>(v + t * C.tile + at, token_at<C.v>(p.v, p.v_strides, first_column() + at, t));
      }
    }
  }

  template <Element type>
  __device__ __forceinline__ const char* token_at(const void* from, const Strides& strides, i64 at, int t = 0) const {
    const i64 offset = batch * strides.batch + t * strides.row + head * strides.head + at;
    return static_cast<const char*>(from) + offset * bytes_of(type);
  }
  template <Element type, int count = 8>
  static __device__ __forceinline__ void load(float* to, const char* from, float factor = 1.0F) {
    RowVector<type, count> values;
    values.load(from);
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = values.at[i] * factor;
  }

  static __device__ __forceinline__ int column(int load) { return load * (C.lanes() * kWidth) + column(); }
  static __device__ __forceinline__ int row(int r) { return row() + r * kRowsApart; }
  /// Loads a token from global memory. The addresses are those of the thread's first column and row.
  __device__ __forceinline__ void load_token(Token& token, const char* at_q, const char* at_k, const char* at_v) const {
    constexpr int apart = C.lanes() * kWidth;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      load<C.k, kWidth>(token.k[l], at_k + l * apart * bytes_of(C.k));
      load<C.q, kWidth>(token.q[l], at_q + l * apart * bytes_of(C.q), p.scale);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) load<C.v, 1>(token.v + r, at_v + r * kRowsApart * bytes_of(C.v));
  }
  /// Reads token t from shared memory.
  __device__ __forceinline__ Token read_token(int t) const {
    Token token;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      read(token.q[l], q + t * C.d + column(l));
      read(token.k[l], k + t * C.d + column(l));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) token.v[r] = v[t * C.tile + row(r)];
    return token;
  }

  __device__ __forceinline__ char* o_at(int t, int at) const {
    const i64 offset = batch * p.o_strides.batch + t * p.o_strides.row + head * p.o_strides.head + first_column() + at;
    return static_cast<char*>(p.o) + offset * bytes_of(C.o);
  }
  __device__ __forceinline__ void write_o(int t, int at, float value) const {
    RowVector<C.o, 1> one;
    one.at[0] = value;
    one.store(o_at(t, at));
  }

  /// Updates the thread's part of the state, and adds q · S over this part to o, row by row.
  static __device__ __forceinline__ void rows_of_v(State (&s)[kRows * kLoads], float (&o)[kRows], float decay,
                                                   const Token& token) {
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        State& state = s[r * kLoads + l];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          state.at[i] = decay * state.at[i] + token.k[l][i] * token.v[r];
          o[r] += token.q[l][i] * state.at[i];
        }
      }
    }
  }

  /// Sums o over the lanes of each row, and writes the sums to the output.
  __device__ __forceinline__ void put_rows(float (&o)[kRows], int t) const {
    sum_lanes<C.lanes(), kRows>(o);
    constexpr int lanes_a_value = C.lanes() / kRows;
    const int lane = thread() % C.lanes();
    if (lane % lanes_a_value == 0) write_o(t, row() + lane / lanes_a_value * kRowsApart, o[0]);
  }

  __device__ __forceinline__ void rows_of_k(State (&s)[kRows * kLoads], float decay, int t) const {
    float value[kWidth];
    float o[kWidth] = {};
    read(value, v + t * C.tile + column());
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = t * C.d + row(r);
      const float key = k[at];
      const float query = q[at];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        s[r].at[i] = decay * s[r].at[i] + key * value[i];
        o[i] += query * s[r].at[i];
      }
    }
    put_columns(o, t);
  }

  /// Sums o over the lanes of each column, and stores the sums for sum_warps().
  __device__ __forceinline__ void put_columns(float (&o)[kWidth], int t) const {
#pragma unroll
    for (int apart = C.lanes(); apart < 32; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) o[i] += __shfl_xor_sync(0xffffffffU, o[i], apart);
    }
    if (thread() % 32 >= C.lanes()) return;
    float* to = sums + (t * C.warps + thread() / 32) * C.tile + column();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = o[i];
  }

  __device__ __forceinline__ void sum_warps() const {
    __syncthreads();
    for (int i = thread(); i < p.tokens * C.tile; i += C.threads()) {
      const int t = i / C.tile;
      const int at = i % C.tile;
      float sum = 0.0F;
#pragma unroll
      for (int warp = 0; warp < C.warps; ++warp) sum += sums[(t * C.warps + warp) * C.tile + at];
      write_o(t, at, sum);
    }
  }

  /// `from` is aligned to 16 bytes.
  static __device__ __forceinline__ void read(float (&to)[kWidth], const float* from) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + i);
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void write_zeros() const {
    for (int i = thread(); i < p.tokens * C.tile; i += C.threads()) write_o(i / C.tile, i % C.tile, 0.0F);
  }
};

}  // namespace tessera::cuda
