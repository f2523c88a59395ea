// SPDX-License-Identifier: Apache-2.0
// Bindings hold what changes from call to call; Executor::run is the call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "tessera/plan.h"
#include "tessera/tensor.h"

namespace tessera {

namespace detail {
class Backend;  // src/plan/backend.h
struct DeviceState;
}  // namespace detail

/// Every tensor a call can take. Shapes: b batch, sq seqlen_q, sk kv.seqlen, hq/hkv heads, d/dv head dims,
/// tq/tk token capacities (varlen tensors are (tokens, heads, dim)), QB/KB query and key blocks.
enum class Slot : std::uint8_t {
  q,           // (b, sq, hq, d) or (tq, hq, d)
  k,           // (b, sk, hkv, d), (tk, hkv, d) or paged (pages, page_size, hkv, d)
  v,           // as k with dv
  o,           // (b, sq, hq, dv) or (tq, hq, dv): output of the forward, input of the backward
  o_residual,  // int8, as o: rounding error of o, output of the forward, input of the backward
  lse,         // fp32 (b, hq, sq) or (hq, tq): output of the forward, input of the backward
  dout,        // as o
  dlse,        // as lse
  dq,
  dk,
  dv,  // as q, k, v; fp32 if the problem has grad_fp32
  sink,
  dsink,         // fp32 (hq)
  alibi_slopes,  // fp32 (hq) or (b, hq)
  cu_seqlens_q,  // int32 (b + 1), from 0, non-decreasing
  cu_seqlens_k,
  seqused_q,  // int32 (b): lengths actually used
  seqused_k,
  page_table,     // int32 (b, pages per sequence)
  page_indptr,    // int32 (b + 1)
  page_indices,   // int32 (n)
  last_page_len,  // int32 (b), 1 … page_size (0 for an empty sequence)
  k2,
  v2,
  dk2,
  dv2,
  cu_seqlens_k2,
  seqused_k2,
  page_table2,
  page_indptr2,
  page_indices2,
  last_page_len2,
  q_offset,   // int64 (b): position of query row 0; default seqlen_k − seqlen_q (compressed causal: 0)
  k_offset,   // int64 (b): position of key 0; default 0
  k_offset2,  // int64 (b): position of key 0 of the second segment; default k_offset + length of the first
  tile_counts,
  tile_indices,
  full_counts,
  full_indices,  // int32; see TileList
  tile_bits,
  full_bits,  // uint32
  bwd_tile_counts,
  bwd_tile_indices,
  bwd_full_counts,
  bwd_full_indices,
  bwd_tile_bits,
  bwd_full_bits,
  next_counts,     // int32 (b, hq, QB)
  next_indices,    // int32 (b, hq, QB, KB)
  next_bits,       // uint32 (b, hq, QB, ceil(KB / 32))
  tile_mass,       // fp32 (b, hq, QB, KB)
  prior_lse,       // as lse
  skip_memory,     // uint8 (b, hq, QB, KB): code c is a mass of 2^((c − 239) / 8); read and written, like tile_bits
  skip_lse,        // as lse: the previous step's LSE, or −inf; read and written
  skip_threshold,  // fp32 (hq): base-2 logarithms of this step's thresholds; −inf keeps every tile
  skip_step,       // int32 (1): steps since the state began; an odd step compares tiles from the last key to the first
  must_do_bits,    // uint32 (ceil(KB / 32)): key blocks that this step computes whatever tile_bits say
  must_skip_bits,  // likewise: key blocks that it leaves out; no block is in both
  dropout_seed,    // uint64 (1): overrides Bindings::seed, for rounding=stochastic and hadamard, too
  dropout_offset,  // uint64 (1)
  o_parts,         // combine: (parts, then the shape of o); nsa_gate: (3, then the shape of o)
  lse_parts,       // combine: fp32 (parts, then the shape of lse)
  k_new,
  v_new,       // kv_append: (b, sq, hkv, d) or (tq, hkv, d)
  rotary_cos,  // kv_append: fp32 or k's dtype (positions, rotary_dim / 2)
  rotary_sin,
  q_rotated,     // kv_append: output, as q (q is then bound and rotated at the new tokens' positions)
  state,         // linear_decode, linear_chunk: (slots, hq, dv, d) for the layout vk, (slots, hq, d, dv) for kv;
                 // read and written; a backward only reads it
  state_slots,   // int32 or int64 (b), by default sequence b has slot b; negative: linear_decode touches no
                 // state and writes o = 0, linear_chunk begins with zeros
  dest_slots,    // as state_slots, where the new state is written; default state_slots; negative: nowhere
  decay_slopes,  // linear_decode, linear_chunk: fp32 (hq), 0 or more; each token multiplies the state by exp(−slope)
  ring_k,        // linear_decode with ring: (slots, hq, 2·ring, d), as k: keys not in the state yet; read and written
  ring_v,        // likewise (slots, hq, 2·ring, dv), as v
  ring_cursor,   // linear_decode with ring: int32 (b), half·(ring + 1) + tokens that wait in it; see ring_advance()
  dstate_final,  // backward of linear_chunk: fp32 (b, hq, last two dims of state): gradient of the final states
  dstate_initial,  // likewise: output, gradient of the initial states
  k_pooled,        // nsa_pool: (b, blocks, hkv, d), or (floor(tk / stride), hkv, d) packed: output of the forward
  v_pooled,        // likewise with dv
  dk_pooled,       // backward of nsa_pool: as k_pooled
  dv_pooled,
  cu_blocks,     // int32 (b + 1): where the compressed blocks of packed sequences begin; output of nsa_pool
  k_projection,  // nsa_pool with project: (hkv, d, d), as k; k_pooled is mean · projection
  v_projection,  // likewise (hkv, dv, dv), as v
  dk_projection,
  dv_projection,       // backward of nsa_pool: fp32, as the projections
  selected_counts,     // nsa_select: int32 (b, hkv or hq, ceil(sq / tile)): number of selected blocks
  selected_indices,    // int32 (…, top): the selected blocks in ascending order, then −1
  compressed_counts,   // nsa_select with compressed_top: as selected_counts, for blocks of compressed keys
  compressed_indices,  // int32 (…, compressed_top): likewise
  gates,               // nsa_gate with gate=given: fp32 (b, sq, hq, 3) or (tq, hq, 3)
  dgates,
  gate_weight,   // nsa_gate with gate=sigmoid: (hq, 3, d), as q
  dgate_weight,  // fp32
  do_parts,      // backward of nsa_gate: as o_parts
  // Descales are fp32, positive and finite. Per head: (b, hkv). Per block: (b, hq or hkv, ceil(sq or sk / block)), for
  // paged keys (pages, hkv, page_size / block). Per token: as lse, for keys (b, hkv, sk), (hkv, tk) or (pages, hkv,
  // page_size).
  q_descale,    // attention: elements of an 8-bit q are multiplied by it
  k_descale,    // likewise
  v_descale,    // likewise
  k_mean,       // attention with smooth: fp32 (b, hkv, d), added to every row of k
  x,            // quantize: (b, sq, hq, d) or (tq, hq, d), fp32, fp16 or bf16
  x_quantized,  // output, as x
  x_descale,    // output; input if the problem has `given`
  x_mean,       // quantize with smooth: output, fp32 (b, hq, d)
  saturated,    // quantize with saturated: output, int64 (1), number of elements that were out of range
  extra0,       // extra tensors of a registered score, then of a registered mask: callable.h
  extra1,
  extra2,
  extra3,
  status,  // int32 (1): first violation when metadata is `report`; see violation_of
  count_,  // not a slot
};

/// "cu_seqlens_q", … the name used in errors, in the C ABI and in files of tensors.
std::string_view to_string(Slot slot) noexcept;
/// nullopt when no slot has this name.
std::optional<Slot> parse_slot(std::string_view name) noexcept;

/// The cursor of a sequence's ring after a linear_decode step of `tokens`. To keep only the first of them, or none,
/// subtract the number of the others from the result. The cursor of a new sequence is 0. A step of no tokens empties
/// the ring; after it the caller sets the cursor to 0.
constexpr std::int32_t ring_advance(std::int32_t cursor, std::int32_t tokens, std::int32_t ring) noexcept {
  const std::int32_t waiting = cursor % (ring + 1);
  const std::int32_t other_half = cursor > ring ? 0 : ring + 1;
  return waiting + tokens > ring ? other_half + tokens : cursor + tokens;
}

/// A violation that a device found in a call's metadata (lengths, page tables, tile lists).
struct Violation {
  Slot slot = Slot::count_;   // the tensor that has it
  std::int64_t sequence = 0;  // the sequence that has it
};
/// Decodes a status word; nullopt for 0, no violation. A run with metadata=report on a device writes the violation of
/// the first sequence that has one, but only if the word holds 0. So one word may serve many runs; the caller sets it
/// to 0 before them.
std::optional<Violation> violation_of(std::int32_t status) noexcept;

/// An element of the score matrix. All members are positions (index + offset), not indices.
struct ScorePoint {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t query = 0;
  std::int64_t key = 0;
};

enum class TileClass : std::uint8_t { none, partial, full };

/// Position ranges of a tile, ends exclusive.
struct TileBounds {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t query_begin = 0, query_end = 0;
  std::int64_t key_begin = 0, key_end = 0;
};

/// score' = value(score). `derivative` is d value / d score at the same score; needed for a backward.
struct ScoreFunction {
  double (*value)(double score, const ScorePoint& at, void* user) = nullptr;
  double (*derivative)(double score, const ScorePoint& at, void* user) = nullptr;
  void* user = nullptr;
};

/// `visible` decides an element; the optional `classify` a whole tile (it must agree with `visible`).
struct MaskFunction {
  bool (*visible)(const ScorePoint& at, void* user) = nullptr;
  TileClass (*classify)(const TileBounds& tile, void* user) = nullptr;
  void* user = nullptr;
};

/// Built-in callables by name, used if the bindings hold none; nullopt for an unknown name.
/// Scores: "relative" (score − 0.02·|query − key|), "soft_clip" (4·tanh(score / 4)).
/// Masks: "document" (the same document of 40 positions, with classifier), "checkerboard" (parity of 8×8 squares),
/// "prefix" (key < 24 or key ≤ query, with classifier).
std::optional<ScoreFunction> builtin_score(std::string_view name) noexcept;
std::optional<MaskFunction> builtin_mask(std::string_view name) noexcept;

/// During a run on the CPU, the thread that called run() calls `interrupted` about twenty times a second. true ends the
/// run within the time of a tile: run() throws Error{cancelled}, and the contents of what it writes (outputs, caches,
/// states) are then undefined. It must not throw.
struct InterruptCheck {
  bool (*interrupted)(void* user) = nullptr;
  void* user = nullptr;
};

struct Bindings {
  std::array<Tensor, static_cast<std::size_t>(Slot::count_)> tensors{};
  std::int64_t batch_offset = 0;  // positions of batch 0 and head 0 for dropout and callables
  std::int64_t head_offset = 0;
  std::uint64_t seed = 0;    // dropout, stochastic rounding, hadamard
  std::uint64_t offset = 0;  // likewise
  ScoreFunction score;       // empty: the built-in that the problem names, or what is registered (callable.h)
  MaskFunction mask;
  InterruptCheck interrupt;

  Tensor& operator[](Slot slot) noexcept { return tensors[static_cast<std::size_t>(slot)]; }
  const Tensor& operator[](Slot slot) const noexcept { return tensors[static_cast<std::size_t>(slot)]; }
};

/// A queue of the target device: nullptr on the CPU, a CUstream on CUDA.
struct Stream {
  void* handle = nullptr;
};

/// Runs a plan. One Executor serves one call at a time; plans may be shared between threads.
class Executor {
 public:
  /// Allocates the plan's workspace once.
  explicit Executor(Plan plan);
  /// Uses the caller's memory, on the device of the plan's target: at least plan.workspace_bytes() bytes, 64-byte
  /// aligned. It is neither zeroed nor freed.
  Executor(Plan plan, void* workspace, std::size_t bytes);
  ~Executor();
  Executor(Executor&&) noexcept;
  Executor& operator=(Executor&&) noexcept;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  /// Later runs use this memory, for which the constructor's rules hold. Throws Error{invalid_argument} for an executor
  /// that allocated its own memory.
  void use(void* workspace, std::size_t bytes);
  /// Validates the bindings, then computes. A run that succeeds neither allocates nor synchronises. Errors are thrown
  /// before anything is written, except that of InterruptCheck.
  /// Kernels of a CUDA plan that are not loaded yet are compiled and loaded; under graph capture that is an error.
  void run(const Bindings& bindings, Stream stream = {});
  /// Compiles and loads what run() will launch, so that it may be captured or timed. Does nothing on the CPU.
  void prepare();

 private:
  Plan plan_;
  const detail::Backend* backend_;             // nullptr once moved from
  std::unique_ptr<detail::DeviceState> kept_;  // what the backend keeps between runs
  void* workspace_ = nullptr;
  std::size_t bytes_ = 0;
  bool owned_ = false;
};

}  // namespace tessera
