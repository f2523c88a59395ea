// SPDX-License-Identifier: Apache-2.0
// A decode step of linear attention that keeps recent tokens in a ring, so that the state is read but seldom written.
// With n tokens waiting in the ring, and a = exp(−slope):
//
//     o_t = a^(n+t+1) · q_t S + Σ_{i≤n+t} a^(n+t−i) · (q_t·k_i) v_i        tokens i ≥ n are the step's own
//
// If the ring has no room for the step's tokens, it is flushed first: S ← a^n · S + Σ_{i<n} a^(n−1−i) · k_i ⊗ v_i, and
// n = 0.
//
// Blocks are those of LinearDecode: each has a part of v of one head of one sequence. Each block reads all waiting keys
// of the head, mostly from L2, and computes the weights itself. No block reads what another writes: each writes its own
// part of v, only the first block writes k, and after a flush tokens go to the half of the ring where none waits.
#pragma once

#include "cuda/linear/linear_decode.cuh"
#include "cuda/ptx/cp_async.cuh"

namespace tessera::cuda {

template <LinearConfig C>
struct LinearRing {
  using Step = LinearDecode<C>;
  using State = StateVector<C.state>;
  static constexpr int kWidth = C.width();
  static constexpr int kRows = Step::kRows;
  static constexpr int kLoads = Step::kLoads;
  // Bytes of a row in shared memory. Rows of v are padded, so that lanes which read a column have few bank conflicts.
  static constexpr int kQueryRow = C.d * bytes_of(C.q);
  static constexpr int kKeyRow = C.d * bytes_of(C.k);
  static constexpr int kPartRow = C.tile * bytes_of(C.v);
  static constexpr int kValueRow = C.ring_value_row();

  const LinearRingParams& p;
  const Step& step;
  char* q;  // shared: (tokens, d); (waiting and the step's tokens, d); (…, tile); weights (tokens, ring + tokens)
  char* k;
  char* v;
  float* weights;
  i64 slot;
  int waiting, first;  // tokens in the ring, and the row of the first
  bool flush;
  float slope;

  static __device__ __forceinline__ void run(const LinearRingParams& p) {
    ptx::griddepcontrol_wait_and_launch();
    extern __shared__ uint4 ring_memory[];
    char* q = reinterpret_cast<char*>(ring_memory);
    const int tokens = p.step.tokens;
    char* k = q + tokens * kQueryRow;
    char* v = k + (p.ring + tokens) * kKeyRow;
    auto* weights = reinterpret_cast<float*>(v + (p.ring + tokens) * kValueRow);
    float* sums = weights + tokens * (p.ring + tokens);
    const auto head = static_cast<int>(blockIdx.y);
    const auto batch = static_cast<int>(blockIdx.z);
    const Step step{p.step, nullptr, nullptr, nullptr, sums, head, batch};
    const int cursor = min(max(p.cursors[batch], 0), 2 * p.ring + 1);
    const i64 slot = step.source();
    if (!step.has(slot)) return step.write_zeros();
    const bool second = cursor > p.ring;
    const int waiting = second ? cursor - p.ring - 1 : cursor;
    const bool flush = tokens == 0 ? waiting > 0 : waiting + tokens > p.ring;
    if (tokens == 0 && !flush) return;
    LinearRing{p, step, q, k, v, weights, slot, waiting, second ? p.ring : 0, flush, p.step.slopes[head]}.update();
  }

  static __device__ __forceinline__ int thread() { return Step::thread(); }
  __device__ __forceinline__ int tokens() const { return p.step.tokens; }
  /// The first token that the state does not contain when the outputs are computed.
  __device__ __forceinline__ int begin() const { return flush ? waiting : 0; }

  __device__ __forceinline__ void update() const {
    u32 bits[kRows * kLoads][4];
    step.read_state(bits, step.part_of(slot), step.bytes_between_rows());
    copy_tokens();
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    keep_tokens();
    softmax_step();
    State s[kRows * kLoads];
#pragma unroll
    for (int i = 0; i < kRows * kLoads; ++i) s[i].widen(bits[i]);
    if (flush) {
      const float decay = decay_of(1);
      for (int i = 0; i < waiting; ++i) take_in(s, decay, i);
      step.write_state(s, slot, step.bytes_between_rows());
    }
    __syncthreads();  // the weights
    for (int t = 0; t < tokens(); ++t) {
      if constexpr (C.rows == StateRows::v) {
        rows_of_v(s, t);
      } else {
        rows_of_k(s, t);
      }
    }
    if constexpr (C.rows == StateRows::k) step.sum_warps();
  }

  /// exp(−slope · tokens); 1 for no tokens, even if the slope is infinite.
  __device__ __forceinline__ float decay_of(int tokens) const {
    return tokens == 0 ? 1.0F : expf(-slope * static_cast<float>(tokens));
  }

  // Copies rows of this head and part to shared memory: those of the ring, then those of the step.
  __device__ __forceinline__ void copy_tokens() const {
    const int head = step.head;
    const auto of_step = [&](const void* from, const Strides& strides, int column, int size) {
      return static_cast<const char*>(from) + (step.batch * strides.batch + head * strides.head + column) * size;
    };
    constexpr int of_q = bytes_of(C.q);
    constexpr int of_k = bytes_of(C.k);
    constexpr int of_v = bytes_of(C.v);
    const int column = Step::first_column();
    copy_rows<kQueryRow, kQueryRow>(q, 0, nullptr, 0, of_step(p.step.q, p.step.q_strides, 0, of_q),
                                    p.step.q_strides.row * of_q);
    copy_rows<kKeyRow, kKeyRow>(k, waiting, ring_row(p.ring_k, p.ring_k_strides, first, 0, of_k),
                                p.ring_k_strides.row * of_k, of_step(p.step.k, p.step.k_strides, 0, of_k),
                                p.step.k_strides.row * of_k);
    copy_rows<kPartRow, kValueRow>(v, waiting, ring_row(p.ring_v, p.ring_v_strides, first, column, of_v),
                                   p.ring_v_strides.row * of_v, of_step(p.step.v, p.step.v_strides, column, of_v),
                                   p.step.v_strides.row * of_v);
  }

  __device__ __forceinline__ char* ring_row(void* ring, const Strides& strides, int row, int column, int size) const {
    const i64 at = slot * strides.batch + step.head * strides.head + row * strides.row + column;
    return static_cast<char*>(ring) + at * size;
  }

  /// Copies `old` rows of the ring and then those of the step, `bytes` each. `apart` is the distance between rows in
  /// shared memory.
  template <int bytes, int apart>
  __device__ __forceinline__ void copy_rows(char* to, int old, const char* ring, i64 ring_step, const char* fresh,
                                            i64 fresh_step) const {
    constexpr int pieces = bytes / 16;
    const u32 target = ptx::shared_address(to);
    for (int i = thread(); i < (old + tokens()) * pieces; i += C.threads()) {
      const int row = i / pieces;
      const int piece = i % pieces * 16;
      const char* from = row < old ? ring + row * ring_step : fresh + (row - old) * fresh_step;
      ptx::cp_async_16(target + row * apart + piece, from + piece);
    }
  }

  /// Writes the step's tokens to the ring: behind those that wait, or after a flush to the other half.
  __device__ __forceinline__ void keep_tokens() const {
    const int next = flush ? p.ring - first : first + waiting;
    constexpr int of_k = bytes_of(C.k);
    constexpr int of_v = bytes_of(C.v);
    store_rows<kPartRow, kValueRow>(v + waiting * kValueRow,
                                    ring_row(p.ring_v, p.ring_v_strides, next, Step::first_column(), of_v),
                                    p.ring_v_strides.row * of_v);
    if (blockIdx.x != 0) return;
    store_rows<kKeyRow, kKeyRow>(k + waiting * kKeyRow, ring_row(p.ring_k, p.ring_k_strides, next, 0, of_k),
                                 p.ring_k_strides.row * of_k);
  }

  template <int bytes, int apart>
  __device__ __forceinline__ void store_rows(const char* from, char* to, i64 to_step) const {
    constexpr int pieces = bytes / 16;
    for (int i = thread(); i < tokens() * pieces; i += C.threads()) {
      const int row = i / pieces;
      const int piece = i % pieces * 16;
      *reinterpret_cast<uint4*>(to + row * to_step + piece) =
          *reinterpret_cast<const uint4*>(from + row * apart + piece);
    }
  }

  /// Computes the weights scale · a^(n+t−i) · q_t·k_i. A warp computes four at a time.
  __device__ __forceinline__ void softmax_step() const {
    constexpr int part = C.d / 32;
    constexpr int together = 4;
    const int lane = thread() % 32;
    for (int t = 0; t < tokens(); ++t) {
      const int last = waiting + t;
      float query[part];
      read<C.q>(query, q + t * kQueryRow + lane * part * bytes_of(C.q));
      for (int i = begin() + thread() / 32 * together; i <= last; i += C.warps * together) {
        float sums[together] = {};
#pragma unroll
        for (int j = 0; j < together; ++j) {
          float key[part];
          read<C.k>(key, k + min(i + j, last) * kKeyRow + lane * part * bytes_of(C.k));
#pragma unroll
          for (int c = 0; c < part; ++c) sums[j] += query[c] * key[c];
        }
        sum_lanes<32, together>(sums);
        const int of_lane = i + lane / (32 / together);
        if (lane % (32 / together) != 0 || of_lane > last) continue;
        weights[t * (p.ring + tokens()) + of_lane] = p.step.scale * decay_of(last - of_lane) * sums[0];
      }
    }
  }
  __device__ __forceinline__ float weight(int t, int i) const { return weights[t * (p.ring + tokens()) + i]; }
  __device__ __forceinline__ float factor_of_state(int t) const {
    return p.step.scale * decay_of((flush ? 0 : waiting) + t + 1);
  }

  /// s ← a · s + k_i ⊗ v_i, the same update as in LinearDecode.
  __device__ __forceinline__ void take_in(State (&s)[kRows * kLoads], float decay, int i) const {
    constexpr bool of_v = C.rows == StateRows::v;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      float along[kWidth];
      const int at = l * (C.lanes() * kWidth) + Step::column();
      if constexpr (of_v) {
        read<C.k>(along, k + i * kKeyRow + at * bytes_of(C.k));
      } else {
        read<C.v>(along, v + i * kValueRow + at * bytes_of(C.v));
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = Step::row(r);
        const float across = of_v ? value(i, row) : key(i, row);
        State& state = s[r * kLoads + l];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) state.at[j] = decay * state.at[j] + along[j] * across;
      }
    }
  }

  __device__ __forceinline__ void rows_of_v(const State (&s)[kRows * kLoads], int t) const {
    float o[kRows] = {};
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      float query[kWidth];
      read<C.q>(query, q + t * kQueryRow + (l * (C.lanes() * kWidth) + Step::column()) * bytes_of(C.q));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) o[r] += query[j] * s[r * kLoads + l].at[j];
      }
    }
    const float factor = factor_of_state(t);
#pragma unroll
    for (int r = 0; r < kRows; ++r) o[r] *= factor;
    // The lanes of a row share the tokens. put_rows() adds their sums together with those of q · S.
    for (int i = begin() + thread() % C.lanes(); i <= waiting + t; i += C.lanes()) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) o[r] += weight(t, i) * value(i, Step::row(r));
    }
    step.put_rows(o, t);
  }

  __device__ __forceinline__ void rows_of_k(const State (&s)[kRows * kLoads], int t) const {
    float o[kWidth] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      RowVector<C.q, 1> query;
      query.load(q + t * kQueryRow + Step::row(r) * bytes_of(C.q));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) o[j] += query.at[0] * s[r].at[j];
    }
    const float factor = factor_of_state(t);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) o[j] *= factor;
    // In the same way, the threads of a column share the tokens.
    for (int i = begin() + thread() / C.lanes(); i <= waiting + t; i += C.threads() / C.lanes()) {
      float values[kWidth];
      read<C.v>(values, v + i * kValueRow + Step::column() * bytes_of(C.v));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) o[j] += weight(t, i) * values[j];
    }
    step.put_columns(o, t);
  }

  __device__ __forceinline__ float value(int i, int at) const {
    RowVector<C.v, 1> one;
    one.load(v + i * kValueRow + at * bytes_of(C.v));
    return one.at[0];
  }
  __device__ __forceinline__ float key(int i, int at) const {
    RowVector<C.k, 1> one;
    one.load(k + i * kKeyRow + at * bytes_of(C.k));
    return one.at[0];
  }

  /// Reads adjacent elements of a row in shared memory, aligned to the bytes of all elements, or to 16 bytes if these
  /// are more.
  template <Element type, int count>
  static __device__ __forceinline__ void read(float (&to)[count], const char* from) {
    constexpr int words = count * bytes_of(type) / 4;
    u32 bits[words];
    if constexpr (words >= 4) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
        bits[i] = four.x, bits[i + 1] = four.y, bits[i + 2] = four.z, bits[i + 3] = four.w;
      }
    } else if constexpr (words == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      bits[0] = two.x, bits[1] = two.y;
    } else {
      bits[0] = *reinterpret_cast<const u32*>(from);
    }
#pragma unroll
    for (int i = 0; i < words; ++i) {
      if constexpr (type == Element::fp32) {
        to[i] = __uint_as_float(bits[i]);
      } else {
        ptx::unpack<type>(bits[i], to[2 * i], to[2 * i + 1]);
      }
    }
  }
};

}  // namespace tessera::cuda
