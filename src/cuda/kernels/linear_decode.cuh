// SPDX-License-Identifier: Apache-2.0
// A step of linear attention on a pool of states (Katharopoulos et al. 2020; Qin et al. 2024, Lightning Attention-2):
//
//     S ← exp(−slope) · S + k ⊗ v        o = (scale · q) · S
//
// The state is read once and written once, and that is all the time there is: at D = 128 and fp32 128 KB a head beside
// 1 KB of everything else, 5 operations for 8 bytes. So each thread asks for all of its part, 16 bytes a load, before
// it uses any, and keeps it in registers for all tokens of the step. A multiprocessor that is to read its share of 4.8
// TB/s with 0.75 µs from request to answer needs 27 KB under way (46 KB where 78 of them share as much); 128 threads
// with 8 loads are 16 KB, and 6 to 8 such blocks are resident.
//
// A block takes `tile` of v of one head of one sequence, so that blocks are independent:
//   rows of v (K contiguous): lanes lie along K, and sums over them are shuffles, of all rows of a warp together;
//   rows of k (V contiguous): lanes lie along V, and sums go over a thread's rows, then lanes, then warps.
#pragma once

#include "cuda/policy/philox.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/tile/row_vector.cuh"
#include "shared/linear.h"

namespace tessera::cuda {

/// 16 bytes of a state as fp32.
template <Element type>
struct StateVector {
  static constexpr int kWidth = 16 / bytes_of(type);
  float at[kWidth];

  __device__ __forceinline__ void widen(const u32 (&bits)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (type == Element::fp32) {
        at[i] = __uint_as_float(bits[i]);
      } else {
        ptx::unpack<type>(bits[i], at[2 * i], at[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(void* to) const {
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (type == Element::fp32) {
        bits[i] = __float_as_uint(at[i]);
      } else {
        bits[i] = ptx::pack<type>(at[2 * i], at[2 * i + 1]);
      }
    }
    ptx::store_16(to, bits);
  }

  /// bf16, up or down by chance: 16 random bits are added to those that are cut off.
  __device__ __forceinline__ void store(void* to, const Philox& draws) const {
    static_assert(type == Element::bf16);
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = rounded(at[2 * i], draws.word[i] & 0xffffU) | rounded(at[2 * i + 1], draws.word[i] >> 16) << 16;
    }
    ptx::store_16(to, bits);
  }
  static __device__ __forceinline__ u32 rounded(float value, u32 draw) {
    const u32 bits = __float_as_uint(value);
    return value != value ? bits >> 16 | 0x40U : (bits + draw) >> 16;
  }
};

/// Sums over `lanes` neighbouring lanes of `count` values each, all at once: every exchange halves what is left to sum.
/// Of lane l it leaves value l / (lanes / count) in x[0], if count <= lanes.
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
  static constexpr int kWidth = C.width();
  static constexpr int kRows = C.rows_a_thread();
  static constexpr int kLoads = C.loads_a_row();
  static constexpr int kRowsApart = 32 / C.lanes();  // between a thread's rows: those of a warp are neighbours
  static_assert(C.is_even());

  const LinearParams& p;
  float* q;  // shared: (tokens, d) scaled, (tokens, d), (tokens, tile), (tokens, warps, tile)
  float* k;
  float* v;
  float* sums;
  int head, batch;

  static __device__ __forceinline__ void run(const LinearParams& p) {
    ptx::take_over();
    extern __shared__ float shared[];
    float* k = shared + p.tokens * C.d;
    float* v = k + p.tokens * C.d;
    const LinearDecode step{
        p, shared, k, v, v + p.tokens * C.tile, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z)};
    const i64 source = step.slot(p.state_slots, p.long_state_slots, step.batch);
    if (source < 0 || source >= p.slots) return step.write_zeros();
    const i64 target = step.slot(p.dest_slots, p.long_dest_slots, source);
    step.update(source, target);
  }

  __device__ __forceinline__ i64 slot(const void* slots, bool is_long, i64 otherwise) const {
    if (slots == nullptr) return otherwise;
    return is_long ? static_cast<const i64*>(slots)[batch] : static_cast<const int*>(slots)[batch];
  }

  static __device__ __forceinline__ int first_column() { return static_cast<int>(blockIdx.x) * C.tile; }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  /// Of a thread: its first row in the block's part of the state, and its first column.
  static __device__ __forceinline__ int row() {
    return thread() / 32 * (kRows * kRowsApart) + thread() % 32 / C.lanes();
  }
  static __device__ __forceinline__ int column() { return thread() % C.lanes() * kWidth; }

  /// This thread's first element in the state of `slot`.
  __device__ __forceinline__ char* part_of(i64 slot) const {
    const int row_of_v = C.rows == StateRows::v ? first_column() : 0;
    const int column_of_v = C.rows == StateRows::v ? 0 : first_column();
    const i64 at =
        slot * p.slot_stride + head * p.head_stride + (row_of_v + row()) * p.row_stride + column_of_v + column();
    return static_cast<char*>(p.state) + at * bytes_of(C.state);
  }

  /// Of a thread.
  __device__ __forceinline__ i64 bytes_between_rows() const { return kRowsApart * p.row_stride * bytes_of(C.state); }
  __device__ __forceinline__ void read_state(u32 (&bits)[kRows * kLoads][4], i64 slot, i64 row_step) const {
    const char* from = part_of(slot);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        ptx::load_once_16(bits[r * kLoads + l], from + l * (C.lanes() * 16));
      }
      from += row_step;
    }
  }
  __device__ __forceinline__ void write_state(const StateVector<C.state> (&s)[kRows * kLoads], i64 slot,
                                              i64 row_step) const {
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

  /// Of the elements of load l of a thread's row r in the state of `slot`.
  __device__ __forceinline__ Philox draws(i64 slot, int r, int l) const {
    constexpr bool of_v = C.rows == StateRows::v;
    const int columns = of_v ? C.d : static_cast<int>(gridDim.x) * C.tile;
    const int at_row = (of_v ? first_column() : 0) + row() + r * kRowsApart;
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

  __device__ __forceinline__ void update(i64 source, i64 target) const {
    const i64 row_step = bytes_between_rows();
    u32 bits[kRows * kLoads][4];
    read_state(bits, source, row_step);
    load_tokens();
    const float decay = expf(-p.slopes[head]);
    StateVector<C.state> s[kRows * kLoads];
#pragma unroll
    for (int i = 0; i < kRows * kLoads; ++i) s[i].widen(bits[i]);
    __syncthreads();
    for (int t = 0; t < p.tokens; ++t) {
      if constexpr (C.rows == StateRows::v) {
        rows_of_v(s, decay, t);
      } else {
        rows_of_k(s, decay, t);
      }
    }
    if (target >= 0 && target < p.slots) write_state(s, target, row_step);
    if constexpr (C.rows == StateRows::k) sum_warps();
  }

  __device__ __forceinline__ void load_tokens() const {
    constexpr int row_steps = C.d / 8;
    constexpr int part_steps = C.tile / 8;
    constexpr int steps = 2 * row_steps + part_steps;
    for (int i = thread(); i < p.tokens * steps; i += C.threads()) {
      const int t = i / steps;
      const int step = i - t * steps;
      if (step < row_steps) {
        load<C.q>(p.q, p.q_strides, t, step * 8, p.scale, q + t * C.d + step * 8);
      } else if (step < 2 * row_steps) {
        const int at = (step - row_steps) * 8;
        load<C.k>(p.k, p.k_strides, t, at, 1.0F, k + t * C.d + at);
      } else {
        const int at = (step - 2 * row_steps) * 8;
        load<C.v>(p.v, p.v_strides, t, first_column() + at, 1.0F, v + t * C.tile + at);
      }
    }
  }

  template <Element type>
  __device__ __forceinline__ void load(const void* from, const Strides& strides, int t, int at, float factor,
                                       float* to) const {
    RowVector<type, 8> values;
    const i64 offset = batch * strides.batch + t * strides.row + head * strides.head + at;
    values.load(static_cast<const char*>(from) + offset * bytes_of(type));
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = values.at[i] * factor;
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

  __device__ __forceinline__ void rows_of_v(StateVector<C.state> (&s)[kRows * kLoads], float decay, int t) const {
    float o[kRows] = {};
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      float key[kWidth];
      float query[kWidth];
      const int at = t * C.d + l * (C.lanes() * kWidth) + column();
      read(key, k + at);
      read(query, q + at);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float value = v[t * C.tile + row() + r * kRowsApart];
        StateVector<C.state>& state = s[r * kLoads + l];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          state.at[i] = decay * state.at[i] + key[i] * value;
          o[r] += query[i] * state.at[i];
        }
      }
    }
    put_rows(o, t);
  }

  /// Sums over the lanes of a row, of all of a thread's rows, into o.
  __device__ __forceinline__ void put_rows(float (&o)[kRows], int t) const {
    sum_lanes<C.lanes(), kRows>(o);
    constexpr int lanes_a_value = C.lanes() / kRows;
    const int lane = thread() % C.lanes();
    if (lane % lanes_a_value == 0) write_o(t, row() + lane / lanes_a_value * kRowsApart, o[0]);
  }

  __device__ __forceinline__ void rows_of_k(StateVector<C.state> (&s)[kRows * kLoads], float decay, int t) const {
    float value[kWidth];
    float o[kWidth] = {};
    read(value, v + t * C.tile + column());
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = t * C.d + row() + r * kRowsApart;
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

  /// Sums over the lanes of a column, for sum_warps().
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
