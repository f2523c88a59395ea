// SPDX-License-Identifier: Apache-2.0
// What is to be computed: no device, no data, no pointer. docs/semantics.md defines every field.
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
/// How the state of a head of linear attention lies in memory: rows of V or rows of K, the other contiguous.
enum class StateLayout : std::uint8_t { vk, kv };
/// How a bf16 state is rounded when it is written: to nearest, or up or down by chance so that the expected value is
/// exact.
enum class Rounding : std::uint8_t { nearest, stochastic };
/// By what nsa_select chooses blocks: sums of probabilities over compressed keys, or products with one compressed key.
enum class SelectScore : std::uint8_t { dot, softmax };
/// Whose scores a tile of queries shares: its first row's, those of the mean of its rows, or the largest of any row.
enum class TileReduce : std::uint8_t { first, mean, max };
/// When a row sees a compressed key under nsa_select's causal mask: once its block is complete, or once it has begun,
/// which shows the row later tokens.
enum class BlockVisible : std::uint8_t { complete, started };
/// Gates of the three branches: a sigmoid of q times a weight, bound, or 1/3.
enum class GateKind : std::uint8_t { sigmoid, given, mean };
/// Which 8-bit elements share a descale: those of a (batch, key head), of a block of a head's tokens, or of a row.
enum class Grain : std::uint8_t { head, block, token };
enum class Metadata : std::uint8_t { trust, clamp, report };

/// One source of keys and values. Two of them may share one softmax (segments).
struct KvSource {
  KvLayout layout = KvLayout::dense;
  std::int64_t seqlen = 0;     // longest length of a sequence (dense: the tensor's length)
  std::int64_t total = 0;      // varlen: capacity in tokens
  std::int64_t page_size = 0;  // paged: tokens a page, 1 and more
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
  bool full = false;      // a second, disjoint list of full tiles is bound (the user's mask is waived there)
  explicit operator bool() const noexcept { return form != Form::none; }
  bool operator==(const TileList&) const = default;
};

/// How the bitmask list of a forward lives across the steps of a diffusion run (docs/skip-state.md): a run reads the
/// list and leaves the next step's in its place.
struct SkipRule {
  enum class Kind : std::uint8_t {
    none,
    mass,       // a tile is kept while its remembered probability mass is above the step's threshold
    threshold,  // LiteAttention's: while a row's score there beats the maximum so far by the step's threshold
  };
  Kind kind = Kind::none;
  bool own_lse = false;     // mass: by this step's LSE, not by the step's before
  std::int64_t growth = 1;  // mass: eighths of an octave by which the memory of a tile left out grows a step
  explicit operator bool() const noexcept { return kind != Kind::none; }
  bool operator==(const SkipRule&) const = default;
};

/// A one-sided or two-sided window around the query's position; nullopt is unbounded. Offsets are inclusive and signed.
struct Window {
  std::optional<std::int64_t> left;
  std::optional<std::int64_t> right;
  bool operator==(const Window&) const = default;
};

/// Compressed key block j stands for tokens j·stride … j·stride + length − 1; visible when complete.
struct CompressedCausal {
  std::int64_t length = 0;
  std::int64_t stride = 0;
  bool operator==(const CompressedCausal&) const = default;
};

/// What combine alone has.
struct Combine {
  std::int64_t parts = 2;  // partial results
  bool operator==(const Combine&) const = default;
};

/// What kv_append alone has.
struct KvAppend {
  Rotary rotary = Rotary::none;
  std::int64_t rotary_dim = 0;  // multiple of 2, at most head_dim_qk
  bool operator==(const KvAppend&) const = default;
};

/// What linear_decode and linear_chunk alone have. Their seqlen_q is the tokens of a step or of the longest sequence,
/// heads_kv is heads_q, head_dim_qk and head_dim_v are the sizes of a state.
struct LinearStates {
  std::int64_t states = 0;         // in the pool; linear_chunk: 0 begins with zeros and keeps no state
  DType state_type = DType::fp32;  // or bf16: read to fp32, rounded once when written
  StateLayout state_layout = StateLayout::vk;
  // linear_decode: tokens of a sequence that wait beside its state, 0 to write every step's; then seqlen_q may be 0,
  // which puts them all into the state.
  std::int64_t ring = 0;
  Rounding rounding = Rounding::nearest;  // linear_decode, for bf16 states; stochastic: by the call's seed and offset
  bool operator==(const LinearStates&) const = default;
};

/// What nsa_pool, nsa_select and nsa_gate have (docs/nsa.md). Tokens of compressed keys are kv's, dense or packed.
struct Nsa {
  std::int64_t length = 64;  // nsa_pool, nsa_select: tokens of a compressed block
  std::int64_t stride = 64;  // from one block to the next, at most length
  bool project = false;      // nsa_pool: means are multiplied by a matrix of each key head
  // nsa_select:
  std::int64_t block = 64;   // tokens of a selection block
  std::int64_t top = 16;     // blocks in a list, forced ones among them
  std::int64_t tile = 1;     // query rows that share a list
  bool query_heads = false;  // a list for each query head, not for each key head
  SelectScore score = SelectScore::dot;
  TileReduce reduce = TileReduce::first;
  BlockVisible visible = BlockVisible::complete;
  std::int64_t initial = 1;            // first blocks of the sequence that are always taken
  std::int64_t local = 2;              // likewise the tile's own blocks and local − 1 before them; 0: none
  bool causal = false;                 // row i is token i and sees nothing behind it
  std::int64_t compressed_top = 0;     // blocks of compressed keys in a second list, for attention to these; 0: no list
  std::int64_t compressed_block = 64;  // compressed keys of such a block
  GateKind gate = GateKind::sigmoid;   // nsa_gate
  bool operator==(const Nsa&) const = default;
};

/// What attention of 8-bit operands and quantize have (docs/quantization.md).
struct Quantization {
  Grain grain = Grain::head;
  std::int64_t block = 64;  // of Grain::block: tokens
  bool smooth = false;      // K is without its mean over the sequence: quantize writes the mean, attention adds it
  // quantize:
  bool hadamard = false;  // rows are rotated first: random signs by the call's seed, then a Hadamard matrix
  bool given = false;     // descales are bound, not found
  bool counts = false;    // how many elements were out of range is written
  bool operator==(const Quantization&) const = default;
};

/// What all operations share, attention's fields, and a struct for each other operation. Problem::check refuses fields
/// of operations other than the problem's.
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
  DType o_type = DType::fp32;  // also of dout; combine: q_type is that of o_parts; quantize: what it writes

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
  TileList list;                               // of the forward, and of the backward unless bwd_list says otherwise
  TileList bwd_list;                           // backward only: a truncated gradient under the forward's own LSE
  TileList::Form next = TileList::Form::none;  // list written by the forward: indices or bitmask
  float next_threshold = 0.0F;                 // a tile is kept when its mass is above this
  SkipRule skip;                               // the forward's list is a SkipState's, which the run moves on a step
  MassKind mass = MassKind::none;              // probability mass per tile (batch, heads_q, query blocks, key blocks)
  bool mass_prior_lse = false;                 // normalise by prior_lse in the bindings, not by this run's LSE
  // Outputs and gradients.
  bool lse = false;         // forward: write the LSE (backward always reads it)
  bool residual = false;    // what rounding o to 16 bits lost: the forward writes o_residual, the backward reads it
  bool dlse = false;        // backward: a gradient of the LSE comes in
  bool grad_fp32 = false;   // dq, dk, dv are fp32 whatever q, k, v are
  bool accumulate = false;  // dq, dk, dv, dsink are added to; needs fp32 gradients
  // Promises.
  bool deterministic = false;  // the backward gives the same bits in every run of a plan; the forward always does
  bool batch_invariant = false;
  Metadata metadata = Metadata::clamp;
  // What other operations than attention have of their own.
  Combine combine;
  KvAppend append;
  LinearStates linear;
  Nsa nsa;
  Quantization quantization;  // attention's too

  bool operator==(const Problem&) const = default;

  /// From one line (docs/grammar.md), for example
  /// "attention b=2 sq=128 sk=128 hq=8 hkv=2 d=64 dtype=bf16 causal sink". Unset keys take defaults (sk = sq, hkv = hq,
  /// dv = d, …). Throws Error{parse} naming the key, or what check() throws.
  static Problem parse(std::string_view text);
  /// The shortest line that parses back to an equal problem.
  [[nodiscard]] std::string to_string() const;
  /// Every rule that needs no bindings. Throws Error.
  void check() const;

  [[nodiscard]] bool is_linear() const noexcept {
    return operation == Operation::linear_decode || operation == Operation::linear_chunk;
  }
  /// A step of no tokens: those that wait beside the states go into them.
  [[nodiscard]] bool only_flushes() const noexcept { return linear.ring > 0 && seqlen_q == 0; }
  [[nodiscard]] std::int64_t group() const noexcept { return heads_q / heads_kv; }
  [[nodiscard]] float softmax_scale() const noexcept;  // scale or its default
  [[nodiscard]] std::int64_t query_blocks() const noexcept;
  /// Key blocks of both segments; those of the second begin at ceil(kv.seqlen / block_kv).
  [[nodiscard]] std::int64_t key_blocks() const noexcept;
  [[nodiscard]] std::int64_t key_blocks_first() const noexcept;
  /// Rows of a list in its head dimension: 1, heads_kv or heads_q.
  [[nodiscard]] std::int64_t list_heads(const TileList& of) const noexcept;
};

}  // namespace tessera
