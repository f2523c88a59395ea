// SPDX-License-Identifier: Apache-2.0
// A problem says what is to be computed; it has no device, no data and no pointer. docs/semantics.md defines every
// field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/tensor.h"

namespace tessera {

enum class Operation : std::uint8_t {
  attention,
  combine,
  kv_append,
  linear_decode,
  linear_chunk,
  nsa_pool,
  nsa_select,
  nsa_gate,
  quantize
};
enum class Pass : std::uint8_t { forward, backward };
enum class Layout : std::uint8_t { dense, varlen };
enum class KvLayout : std::uint8_t { dense, varlen, paged_table, paged_csr };
enum class Rotary : std::uint8_t { none, half, interleaved };
enum class MassKind : std::uint8_t { none, mean, rms };
/// Layout of a head's state in linear attention: vk is (dv, d), kv is (d, dv), the last dimension contiguous.
enum class StateLayout : std::uint8_t { vk, kv };
/// How a bf16 state is rounded when it is written: to nearest, or up or down at random so that the expected value is
/// exact.
enum class Rounding : std::uint8_t { nearest, stochastic };
/// How nsa_select scores blocks: `dot` by products with the one compressed key of a block, `softmax` by sums of
/// probabilities over compressed keys.
enum class SelectScore : std::uint8_t { dot, softmax };
/// The scores that the rows of a query tile share: those of the first row, those of the mean of the rows, or the
/// largest of any row.
enum class TileReduce : std::uint8_t { first, mean, max };
/// When a row sees a compressed key under nsa_select's causal mask: once its block is complete, or once its block has
/// begun. In the second case the row sees later tokens.
enum class BlockVisible : std::uint8_t { complete, started };
/// Gates of the three branches: the sigmoid of q times a weight, bound values, or 1/3.
enum class GateKind : std::uint8_t { sigmoid, given, mean };
/// Which 8-bit elements share a descale: those of a (batch, key head), of a block of a head's tokens, or of one row.
enum class Grain : std::uint8_t { head, block, token };
enum class Metadata : std::uint8_t { trust, clamp, report };

/// One source of keys and values. Two of them may share one softmax (segments).
struct KvSource {
  KvLayout layout = KvLayout::dense;
  std::int64_t seqlen = 0;     // length of the longest sequence (dense: the tensor's length)
  std::int64_t total = 0;      // varlen: capacity in tokens
  std::int64_t page_size = 0;  // paged: tokens per page, 1 or more
  std::int64_t pages = 0;      // paged: pages in the pool
  bool seqused = false;        // per-sequence lengths are bound (always so for paged_table)
  bool operator==(const KvSource&) const = default;
};

/// How a list of tiles is stored; block_q and block_kv are the problem's.
struct TileList {
  enum class Form : std::uint8_t {
    none,
    indices,     // tile_counts (batch, heads, query blocks); tile_indices (…, capacity): sorted unique key blocks
    bitmask,     // tile_bits (batch, heads, query blocks, ceil(key blocks / 32)) uint32, bit kb % 32 of word kb / 32
    transposed,  // KV-major: tile_counts (batch, heads, key blocks); tile_indices (…, capacity): sorted query blocks
  };
  enum class Heads : std::uint8_t { one, kv, q };
  Form form = Form::none;
  Heads heads = Heads::q;
  bool per_batch = true;  // false: the batch dimension of the list is 1
  bool full = false;      // a second, disjoint list of full tiles is bound, in which the user's mask is not evaluated
  explicit operator bool() const noexcept { return form != Form::none; }
  bool operator==(const TileList&) const = default;
};

/// How a forward updates its bitmask list across the steps of a diffusion run (docs/skip-state.md): a run reads the
/// list and writes the next step's list in its place.
struct SkipRule {
  enum class Kind : std::uint8_t {
    none,
    mass,       // a tile is kept while its remembered probability mass is above the step's threshold
    threshold,  // LiteAttention's: kept while a row's largest score in it exceeds its previous maximum + the threshold
  };
  Kind kind = Kind::none;
  bool own_lse = false;     // mass: normalise by this step's LSE, not by the previous step's
  std::int64_t growth = 1;  // mass: the mass of a tile left out grows by 2^(growth / 8) a step
  explicit operator bool() const noexcept { return kind != Kind::none; }
  bool operator==(const SkipRule&) const = default;
};

/// A one-sided or two-sided window around the query's position; nullopt is unbounded. Offsets are inclusive and signed.
struct Window {
  std::optional<std::int64_t> left;
  std::optional<std::int64_t> right;
  bool operator==(const Window&) const = default;
};

/// Compressed key j stands for tokens j·stride … j·stride + length − 1; it is visible once they are complete.
struct CompressedCausal {
  std::int64_t length = 0;
  std::int64_t stride = 0;
  bool operator==(const CompressedCausal&) const = default;
};

/// Fields of combine only.
struct Combine {
  std::int64_t parts = 2;  // partial results
  bool operator==(const Combine&) const = default;
};

/// Fields of kv_append only.
struct KvAppend {
  Rotary rotary = Rotary::none;
  std::int64_t rotary_dim = 0;  // multiple of 2, at most head_dim_qk
  bool operator==(const KvAppend&) const = default;
};

/// Fields of linear_decode and linear_chunk only. For these, seqlen_q is the number of tokens of a step or of the
/// longest sequence, heads_kv is heads_q, and a state has the dimensions head_dim_qk and head_dim_v.
struct LinearStates {
  std::int64_t states = 0;         // states in the pool; linear_chunk with 0 begins with zeros and keeps no state
  DType state_type = DType::fp32;  // fp32 or bf16; bf16 is widened to fp32 when read and rounded once when written
  StateLayout state_layout = StateLayout::vk;
  // linear_decode: the most tokens of a sequence that wait beside its state; 0: each step is added to the state at
  // once. With a ring, seqlen_q may be 0: such a step adds all waiting tokens to the state.
  std::int64_t ring = 0;
  Rounding rounding = Rounding::nearest;  // linear_decode, for bf16 states; stochastic uses the call's seed and offset
  bool operator==(const LinearStates&) const = default;
};

/// Fields of nsa_pool, nsa_select and nsa_gate (docs/nsa.md). `kv` describes the tokens of which compressed keys are
/// made, dense or varlen.
struct Nsa {
  std::int64_t length = 64;  // nsa_pool, nsa_select: tokens of a compressed block
  std::int64_t stride = 64;  // tokens between the starts of neighbouring blocks, at most length
  bool project = false;      // nsa_pool: each key head multiplies its means by a matrix
  // nsa_select:
  std::int64_t block = 64;   // tokens of a selection block
  std::int64_t top = 16;     // the most blocks in a list, including those that are always taken
  std::int64_t tile = 1;     // query rows that share a list
  bool query_heads = false;  // a list for each query head, not for each key head
  SelectScore score = SelectScore::dot;
  TileReduce reduce = TileReduce::first;
  BlockVisible visible = BlockVisible::complete;
  std::int64_t initial = 1;            // number of first blocks of the sequence that are always taken
  std::int64_t local = 2;              // likewise: the tile's own blocks and local − 1 before them; 0: none
  bool causal = false;                 // a row sees no token after its own
  std::int64_t compressed_top = 0;     // the most blocks of a second list, for attention to compressed keys; 0: no list
  std::int64_t compressed_block = 64;  // compressed keys per block of that list
  GateKind gate = GateKind::sigmoid;   // nsa_gate
  bool operator==(const Nsa&) const = default;
};

/// Fields of quantize and of attention with 8-bit operands (docs/quantization.md).
struct Quantization {
  Grain grain = Grain::head;
  std::int64_t block = 64;  // with Grain::block: tokens per block
  bool smooth = false;      // K's mean over the sequence is subtracted: quantize writes the mean, attention adds it
  // quantize:
  bool hadamard = false;  // rows are rotated first: random signs from the call's seed, then a Hadamard matrix
  bool given = false;     // descales are inputs and not computed
  bool counts = false;    // the number of elements that were out of range is written
  bool operator==(const Quantization&) const = default;
};

/// Fields that all operations share, those of attention, and a struct for each other operation. Problem::check refuses
/// fields that are set and belong to other operations only.
struct Problem {
  Operation operation = Operation::attention;
  Pass pass = Pass::forward;

  // Capacities. For varlen, seqlen_q is the longest sequence and total_q the token capacity.
  std::int64_t batch = 1;
  std::int64_t seqlen_q = 0;
  std::int64_t total_q = 0;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim_qk = 64;
  std::int64_t head_dim_v = 64;
  DType q_type = DType::fp32;
  DType k_type = DType::fp32;
  DType v_type = DType::fp32;
  DType o_type = DType::fp32;  // also of dout; combine: o_parts has q_type; quantize: the type of its output

  Layout q_layout = Layout::dense;
  bool seqused_q = false;
  KvSource kv;
  std::optional<KvSource> kv2;

  // Scores.
  std::optional<float> scale;  // default 1 / sqrt(head_dim_qk)
  float softcap = 0.0F;        // 0: none
  bool alibi = false;
  std::string score;  // name of a score callable, "" for none
  // Masks.
  Window window;
  std::optional<CompressedCausal> compressed_causal;
  std::int64_t chunk = 0;  // a query sees keys of its own chunk only, floor(position / chunk); 0: no chunks
  std::string mask;        // name of a mask callable, "" for none
  // Softmax.
  bool sink = false;
  float dropout = 0.0F;  // probability of dropping
  // Tiles.
  std::int64_t block_q = 64;
  std::int64_t block_kv = 64;
  TileList list;                               // of the forward, and of the backward without a bwd_list
  TileList bwd_list;                           // backward only: a truncated gradient under the forward's own LSE
  TileList::Form next = TileList::Form::none;  // list written by the forward: indices or bitmask
  float next_threshold = 0.0F;                 // a tile is kept when its mass is above this
  SkipRule skip;                               // the forward's list is a SkipState's; the run advances it by a step
  MassKind mass = MassKind::none;              // probability mass per tile (batch, heads_q, query blocks, key blocks)
  bool mass_prior_lse = false;                 // normalise by prior_lse in the bindings, not by this run's LSE
  // Outputs and gradients.
  bool lse = false;         // forward: write the LSE (backward always reads it)
  bool residual = false;    // rounding error of an o with 16 bits: the forward writes o_residual, the backward reads it
  bool dlse = false;        // backward: a gradient of the LSE comes in
  bool grad_fp32 = false;   // dq, dk, dv are fp32 whatever q, k, v are
  bool accumulate = false;  // gradients are added to dq, dk, dv, dsink; needs grad_fp32
  // Promises.
  bool deterministic = false;  // the backward gives the same bits in every run of a plan; the forward always does
  bool batch_invariant = false;
  Metadata metadata = Metadata::clamp;
  // Fields of other operations.
  Combine combine;
  KvAppend append;
  LinearStates linear;
  Nsa nsa;
  Quantization quantization;  // of attention, too

  bool operator==(const Problem&) const = default;

  /// From one line (docs/grammar.md), for example
  /// "attention b=2 sq=128 sk=128 hq=8 hkv=2 d=64 dtype=bf16 causal sink". Unset keys take defaults (sk = sq, hkv = hq,
  /// dv = d, …). Throws Error{parse} naming the key, or what check() throws.
  static Problem parse(std::string_view text);
  /// The shortest line that parses back to an equal problem.
  [[nodiscard]] std::string to_string() const;
  /// Checks every rule that needs no bindings. Throws Error.
  void check() const;

  [[nodiscard]] bool is_linear() const noexcept {
    return operation == Operation::linear_decode || operation == Operation::linear_chunk;
  }
  /// Whether this is a linear_decode step without tokens, which only adds the waiting tokens to the states.
  [[nodiscard]] bool only_flushes() const noexcept { return linear.ring > 0 && seqlen_q == 0; }
  [[nodiscard]] std::int64_t group() const noexcept { return heads_q / heads_kv; }
  [[nodiscard]] float softmax_scale() const noexcept;  // scale or its default
  [[nodiscard]] std::int64_t query_blocks() const noexcept;
  /// Key blocks of both segments; those of the second begin at ceil(kv.seqlen / block_kv).
  [[nodiscard]] std::int64_t key_blocks() const noexcept;
  [[nodiscard]] std::int64_t key_blocks_first() const noexcept;
  /// Size of a list's head dimension: 1, heads_kv or heads_q.
  [[nodiscard]] std::int64_t list_heads(const TileList& of) const noexcept;
};

}  // namespace tessera
