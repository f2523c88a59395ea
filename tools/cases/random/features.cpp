// SPDX-License-Identifier: Apache-2.0
#include "cases/random/features.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace tessera::cases {
namespace {

enum Operations : unsigned {
  kForward = 1,
  kBackward = 2,
  kCombine = 4,
  kAppend = 8,
  kDecode = 16,
  kChunk = 32,  // forward
  kChunkBackward = 64,
  kPool = 128,  // forward
  kPoolBackward = 256,
  kSelect = 512,
  kGate = 1024,  // forward
  kGateBackward = 2048,
  kQuantize = 4096,
};
constexpr unsigned kAttention = kForward | kBackward;
constexpr unsigned kOfSequences = kAttention | kCombine | kAppend;
constexpr unsigned kChunks = kChunk | kChunkBackward;
constexpr unsigned kLinear = kDecode | kChunks;
constexpr unsigned kPools = kPool | kPoolBackward;
constexpr unsigned kGates = kGate | kGateBackward;
constexpr unsigned kCompressed = kPools | kSelect;
constexpr unsigned kSixteenBits = kOfSequences | kLinear | kCompressed | kGates;
constexpr unsigned kEightBits = kForward | kQuantize;
constexpr unsigned kAll = kSixteenBits | kQuantize;

struct Feature {
  std::string_view name;
  std::string_view group;  // a problem has at most one feature of a group; "" for none
  unsigned operations;     // where the feature may come up
  bool (*present)(const Case&);
};

bool same_types(const Problem& p, DType type) {
  return p.q_type == type && p.k_type == type && p.v_type == type && p.o_type == type;
}
bool has_type(const Problem& p, DType type) {
  return p.k_type == type || p.v_type == type || (p.operation == Operation::quantize && p.o_type == type);
}
bool eight_bits(const Problem& p) {
  return has_type(p, DType::e4m3) || has_type(p, DType::e5m2) || has_type(p, DType::int8);
}
bool mixed_types(const Problem& p) {
  return !eight_bits(p) && !same_types(p, DType::fp32) && !same_types(p, DType::fp16) && !same_types(p, DType::bf16);
}
bool is_paged(const KvSource& source) {
  return source.layout == KvLayout::paged_table || source.layout == KvLayout::paged_csr;
}
bool is_pool(const Case& c) { return c.problem.operation == Operation::nsa_pool; }
bool is_select(const Case& c) { return c.problem.operation == Operation::nsa_select; }
bool is_gate(const Case& c) { return c.problem.operation == Operation::nsa_gate; }
bool has_keys(const Problem& p) {
  return p.operation == Operation::attention || p.operation == Operation::kv_append ||
         p.operation == Operation::nsa_pool || p.operation == Operation::nsa_select;
}
bool is_decode(const Case& c) { return c.problem.operation == Operation::linear_decode; }
bool is_chunk(const Case& c) { return c.problem.operation == Operation::linear_chunk; }
bool negative(const Window& window) { return window.left.value_or(0) < 0 || window.right.value_or(0) < 0; }
bool causal(const Window& window) { return !window.left && window.right == 0; }
bool any_list(const Problem& p, bool (*test)(const TileList&)) {
  return (p.list && test(p.list)) || (p.bwd_list && test(p.bwd_list));
}
bool has_zero(const std::vector<std::int64_t>& list) { return std::find(list.begin(), list.end(), 0) != list.end(); }
std::int64_t longest(const std::vector<std::int64_t>& used, const std::vector<std::int64_t>& lens,
                     std::int64_t otherwise) {
  const std::vector<std::int64_t>& list = used.empty() ? lens : used;
  return list.empty() ? otherwise : *std::max_element(list.begin(), list.end());
}
/// Three tiles or more both ways, in some sequence.
bool spans(const Case& c) {
  if (!c.wishes.tile_q || !c.wishes.tile_kv) return false;
  const Values& v = c.values;
  std::int64_t keys = longest(v.used_k, v.lens_k, c.problem.kv.seqlen);
  if (c.problem.kv2) keys += longest(v.used_k2, v.lens_k2, c.problem.kv2->seqlen);
  return longest(v.used_q, v.lens_q, c.problem.seqlen_q) > 2 * *c.wishes.tile_q && keys > 2 * *c.wishes.tile_kv;
}
bool has_empty_sequence(const Case& c) {
  if (is_decode(c)) return false;  // a step of no tokens is a flush
  const Values& v = c.values;
  return (c.problem.seqlen_q == 0 && !is_pool(c)) || (has_keys(c.problem) && c.problem.kv.seqlen == 0) ||
         has_zero(v.lens_q) || has_zero(v.used_q) || has_zero(v.lens_k) || has_zero(v.used_k) || has_zero(v.lens_k2) ||
         has_zero(v.used_k2);
}
bool is_drawn(const Case& c, InputKind::Kind kind) { return c.values.inputs.kind == kind; }

constexpr Feature kFeatures[] = {
    {"forward", "operation", kForward,
     [](const Case& c) { return c.problem.operation == Operation::attention && c.problem.pass == Pass::forward; }},
    {"backward", "operation", kBackward,
     [](const Case& c) { return c.problem.operation == Operation::attention && c.problem.pass == Pass::backward; }},
    {"combine", "operation", kCombine, [](const Case& c) { return c.problem.operation == Operation::combine; }},
    {"kv_append", "operation", kAppend, [](const Case& c) { return c.problem.operation == Operation::kv_append; }},
    {"linear_decode", "operation", kDecode, is_decode},
    {"linear_chunk", "operation", kChunk, [](const Case& c) { return is_chunk(c) && c.problem.pass == Pass::forward; }},
    {"linear_chunk_backward", "operation", kChunkBackward,
     [](const Case& c) { return is_chunk(c) && c.problem.pass == Pass::backward; }},
    {"nsa_pool", "operation", kPool, [](const Case& c) { return is_pool(c) && c.problem.pass == Pass::forward; }},
    {"nsa_pool_backward", "operation", kPoolBackward,
     [](const Case& c) { return is_pool(c) && c.problem.pass == Pass::backward; }},
    {"nsa_select", "operation", kSelect, is_select},
    {"nsa_gate", "operation", kGate, [](const Case& c) { return is_gate(c) && c.problem.pass == Pass::forward; }},
    {"nsa_gate_backward", "operation", kGateBackward,
     [](const Case& c) { return is_gate(c) && c.problem.pass == Pass::backward; }},
    {"quantize", "operation", kQuantize, [](const Case& c) { return c.problem.operation == Operation::quantize; }},
    {"nsa_softmax", "", kSelect, [](const Case& c) { return c.problem.nsa.score == SelectScore::softmax; }},
    {"nsa_first", "reduce", kSelect,
     [](const Case& c) { return is_select(c) && c.problem.nsa.reduce == TileReduce::first; }},
    {"nsa_mean", "reduce", kSelect, [](const Case& c) { return c.problem.nsa.reduce == TileReduce::mean; }},
    {"nsa_max", "reduce", kSelect, [](const Case& c) { return c.problem.nsa.reduce == TileReduce::max; }},
    {"nsa_query_heads", "", kSelect, [](const Case& c) { return c.problem.nsa.query_heads; }},
    {"nsa_causal", "", kSelect, [](const Case& c) { return c.problem.nsa.causal; }},
    {"nsa_compressed_list", "", kSelect, [](const Case& c) { return c.problem.nsa.compressed_top > 0; }},
    {"nsa_started", "", kSelect, [](const Case& c) { return c.problem.nsa.visible == BlockVisible::started; }},
    {"nsa_sigmoid", "gate", kGates,
     [](const Case& c) { return is_gate(c) && c.problem.nsa.gate == GateKind::sigmoid; }},
    {"nsa_given", "gate", kGates, [](const Case& c) { return c.problem.nsa.gate == GateKind::given; }},
    {"nsa_overlap", "", kCompressed, [](const Case& c) { return c.problem.nsa.stride < c.problem.nsa.length; }},
    {"nsa_project", "", kPools, [](const Case& c) { return c.problem.nsa.project; }},
    {"fp32", "types", kSixteenBits, [](const Case& c) { return same_types(c.problem, DType::fp32); }},
    {"fp16", "types", kSixteenBits, [](const Case& c) { return same_types(c.problem, DType::fp16); }},
    {"bf16", "types", kSixteenBits, [](const Case& c) { return same_types(c.problem, DType::bf16); }},
    {"mixed_types", "types", kSixteenBits, [](const Case& c) { return mixed_types(c.problem); }},
    {"int8", "types", kEightBits, [](const Case& c) { return has_type(c.problem, DType::int8); }},
    {"fp8", "types", kEightBits,
     [](const Case& c) { return eight_bits(c.problem) && !has_type(c.problem, DType::int8); }},
    {"descale_block", "grain", kEightBits, [](const Case& c) { return c.problem.quantization.grain == Grain::block; }},
    {"descale_token", "grain", kEightBits, [](const Case& c) { return c.problem.quantization.grain == Grain::token; }},
    {"smooth", "", kEightBits, [](const Case& c) { return c.problem.quantization.smooth; }},
    {"hadamard", "", kQuantize, [](const Case& c) { return c.problem.quantization.hadamard; }},
    {"given_descales", "", kQuantize, [](const Case& c) { return c.problem.quantization.given; }},
    {"saturated", "", kQuantize, [](const Case& c) { return c.problem.quantization.counts; }},
    {"three_tiles", "", kAttention, spans},
    {"varlen_q", "", kOfSequences | kChunks | kSelect | kGates | kQuantize, [](const Case& c) { return c.problem.q_layout == Layout::varlen; }},
    {"seqused_q", "", kAttention | kAppend | kQuantize, [](const Case& c) { return c.problem.seqused_q; }},
    {"kv_dense", "kv", kAttention | kAppend | kCompressed,
     [](const Case& c) { return has_keys(c.problem) && c.problem.kv.layout == KvLayout::dense; }},
    {"kv_varlen", "kv", kAttention | kCompressed, [](const Case& c) { return c.problem.kv.layout == KvLayout::varlen; }},
    {"kv_table", "kv", kForward | kAppend, [](const Case& c) { return c.problem.kv.layout == KvLayout::paged_table; }},
    {"kv_csr", "kv", kForward | kAppend, [](const Case& c) { return c.problem.kv.layout == KvLayout::paged_csr; }},
    {"seqused_k", "", kAttention | kAppend, [](const Case& c) { return c.problem.kv.seqused; }},
    {"shuffled_pages", "", kForward | kAppend, [](const Case& c) { return c.values.shuffled_pages; }},
    {"kv2_dense", "kv2", kAttention,
     [](const Case& c) { return c.problem.kv2 && c.problem.kv2->layout == KvLayout::dense; }},
    {"kv2_varlen", "kv2", kAttention,
     [](const Case& c) { return c.problem.kv2 && c.problem.kv2->layout == KvLayout::varlen; }},
    {"kv2_paged", "kv2", kForward, [](const Case& c) { return c.problem.kv2 && is_paged(*c.problem.kv2); }},
    {"grouped_heads", "", kAttention | kAppend | kSelect | kQuantize, [](const Case& c) { return c.problem.heads_q != c.problem.heads_kv; }},
    {"batch", "", kAll, [](const Case& c) { return c.problem.batch > 1; }},
    {"dims_differ", "", kSixteenBits & ~kSelect, [](const Case& c) { return c.problem.head_dim_qk != c.problem.head_dim_v; }},
    {"dim_over_64", "", kAll, [](const Case& c) { return std::max(c.problem.head_dim_qk, c.problem.head_dim_v) > 64; }},
    {"empty_sequence", "", kOfSequences | kChunks | kCompressed | kGates | kQuantize, has_empty_sequence},
    {"q_offset", "", kAttention | kSelect, [](const Case& c) { return !c.values.q_offset.empty(); }},
    {"far_offset", "", kAttention,
     [](const Case& c) {
       const std::vector<std::int64_t>& q = c.values.q_offset;
       const std::vector<std::int64_t>& k = c.values.k_offset;
       return !q.empty() && std::abs(q.front() - (k.empty() ? 0 : k.front())) > 1 << 20;
     }},
    {"k_offset", "", kAttention, [](const Case& c) { return !c.values.k_offset.empty(); }},
    {"k_offset2", "", kAttention, [](const Case& c) { return !c.values.k_offset2.empty(); }},
    {"inputs_scaled_down", "inputs", kAttention,
     [](const Case& c) { return is_drawn(c, InputKind::Kind::scale) && c.values.inputs.factor <= 2.0F; }},
    {"inputs_scaled_up", "inputs", kAttention,
     [](const Case& c) { return is_drawn(c, InputKind::Kind::scale) && c.values.inputs.factor > 2.0F; }},
    {"inputs_rising", "inputs", kAttention, [](const Case& c) { return is_drawn(c, InputKind::Kind::rising); }},
    {"inputs_sink", "inputs", kAttention, [](const Case& c) { return is_drawn(c, InputKind::Kind::sink); }},
    {"inputs_outliers", "inputs", kAttention, [](const Case& c) { return is_drawn(c, InputKind::Kind::outliers); }},
    {"inputs_nan_tail", "inputs", kAttention, [](const Case& c) { return is_drawn(c, InputKind::Kind::nan_tail); }},
    {"batch_offset", "", kAttention, [](const Case& c) { return c.values.batch_offset != 0; }},
    {"head_offset", "", kAttention, [](const Case& c) { return c.values.head_offset != 0; }},
    {"causal", "window", kAttention, [](const Case& c) { return causal(c.problem.window); }},
    {"window", "window", kAttention,
     [](const Case& c) { return c.problem.window != Window{} && !causal(c.problem.window) && !negative(c.problem.window); }},
    {"negative_window", "window", kAttention, [](const Case& c) { return negative(c.problem.window); }},
    {"compressed_causal", "", kAttention, [](const Case& c) { return c.problem.compressed_causal.has_value(); }},
    {"chunk", "", kAttention, [](const Case& c) { return c.problem.chunk > 0; }},
    {"scale", "", kAttention | kLinear | kSelect, [](const Case& c) { return c.problem.scale.has_value(); }},
    {"scale_not_positive", "", kAttention | kSelect, [](const Case& c) { return c.problem.scale.value_or(1.0F) <= 0.0F; }},
    {"softcap", "", kAttention, [](const Case& c) { return c.problem.softcap > 0; }},
    {"softcap_extreme", "", kAttention,
     [](const Case& c) { return c.problem.softcap > 0 && std::abs(std::log10(c.problem.softcap)) > 2; }},
    {"alibi", "", kAttention, [](const Case& c) { return c.problem.alibi; }},
    {"score_relative", "score", kAttention, [](const Case& c) { return c.problem.score == "relative"; }},
    {"score_soft_clip", "score", kAttention, [](const Case& c) { return c.problem.score == "soft_clip"; }},
    {"mask_document", "mask", kAttention, [](const Case& c) { return c.problem.mask == "document"; }},
    {"mask_checkerboard", "mask", kAttention, [](const Case& c) { return c.problem.mask == "checkerboard"; }},
    {"mask_prefix", "mask", kAttention, [](const Case& c) { return c.problem.mask == "prefix"; }},
    {"alibi_extreme", "", kForward, [](const Case& c) { return c.values.extreme_slopes; }},
    {"sink", "", kAttention | kCombine, [](const Case& c) { return c.problem.sink; }},
    {"sink_extreme", "", kAttention, [](const Case& c) { return c.values.extreme_sinks; }},
    {"dropout", "", kAttention, [](const Case& c) { return c.problem.dropout > 0; }},
    {"dropout_near_one", "", kAttention, [](const Case& c) { return c.problem.dropout >= 0.99F; }},
    {"non_finite", "", kAttention | kQuantize, [](const Case& c) { return !c.values.non_finite.empty(); }},
    {"list_indices", "list", kAttention, [](const Case& c) { return c.problem.list.form == TileList::Form::indices; }},
    {"list_bitmask", "list", kAttention, [](const Case& c) { return c.problem.list.form == TileList::Form::bitmask; }},
    {"list_transposed", "list", kAttention,
     [](const Case& c) { return c.problem.list.form == TileList::Form::transposed; }},
    {"list_heads_one", "", kAttention,
     [](const Case& c) {
       return any_list(c.problem, [](const TileList& list) { return list.heads == TileList::Heads::one; });
     }},
    {"list_heads_kv", "", kAttention,
     [](const Case& c) {
       return any_list(c.problem, [](const TileList& list) { return list.heads == TileList::Heads::kv; });
     }},
    {"list_heads_q", "", kAttention,
     [](const Case& c) {
       return any_list(c.problem, [](const TileList& list) { return list.heads == TileList::Heads::q; });
     }},
    {"list_batch_one", "", kAttention,
     [](const Case& c) { return any_list(c.problem, [](const TileList& list) { return !list.per_batch; }); }},
    {"list_full", "", kAttention,
     [](const Case& c) { return any_list(c.problem, [](const TileList& list) { return list.full; }); }},
    {"bwd_list_indices", "bwd_list", kBackward,
     [](const Case& c) { return c.problem.bwd_list.form == TileList::Form::indices; }},
    {"bwd_list_bitmask", "bwd_list", kBackward,
     [](const Case& c) { return c.problem.bwd_list.form == TileList::Form::bitmask; }},
    {"bwd_list_transposed", "bwd_list", kBackward,
     [](const Case& c) { return c.problem.bwd_list.form == TileList::Form::transposed; }},
    {"next_indices", "next", kForward, [](const Case& c) { return c.problem.next == TileList::Form::indices; }},
    {"next_bitmask", "next", kForward, [](const Case& c) { return c.problem.next == TileList::Form::bitmask; }},
    {"mass_mean", "mass", kForward, [](const Case& c) { return c.problem.mass == MassKind::mean; }},
    {"mass_rms", "mass", kForward, [](const Case& c) { return c.problem.mass == MassKind::rms; }},
    {"mass_prior_lse", "", kForward, [](const Case& c) { return c.problem.mass_prior_lse; }},
    {"skip_mass", "skip", kForward,
     [](const Case& c) { return c.problem.skip.kind == SkipRule::Kind::mass && !c.problem.skip.own_lse; }},
    {"skip_mass_own", "skip", kForward,
     [](const Case& c) { return c.problem.skip.kind == SkipRule::Kind::mass && c.problem.skip.own_lse; }},
    {"skip_threshold", "skip", kForward, [](const Case& c) { return c.problem.skip.kind == SkipRule::Kind::threshold; }},
    {"lse", "", kForward | kCombine, [](const Case& c) { return c.problem.lse; }},
    {"residual", "", kAttention, [](const Case& c) { return c.problem.residual; }},
    {"dlse", "", kBackward, [](const Case& c) { return c.problem.dlse; }},
    {"grad_fp32", "", kBackward, [](const Case& c) { return c.problem.grad_fp32; }},
    {"accumulate", "", kBackward, [](const Case& c) { return c.problem.accumulate; }},
    {"deterministic", "", kAttention | kLinear | kPools | kGates, [](const Case& c) { return c.problem.deterministic; }},
    {"batch_invariant", "", kAttention | kLinear | kCompressed | kGates, [](const Case& c) { return c.problem.batch_invariant; }},
    {"splits", "", kAttention, [](const Case& c) { return c.wishes.splits.value_or(1) > 1; }},
    {"two_threads", "", kAll, [](const Case& c) { return c.threads > 1; }},
    {"heads_first", "strides", kAll, [](const Case& c) { return c.values.strides == Strides::heads_first; }},
    {"row_gaps", "strides", kAll, [](const Case& c) { return c.values.strides == Strides::gaps; }},
    {"zero_strides", "strides", kAll, [](const Case& c) { return c.values.strides == Strides::zero; }},
    {"negative_strides", "strides", kAll, [](const Case& c) { return c.values.strides == Strides::negative; }},
    {"odd_strides", "strides", kAll, [](const Case& c) { return c.values.strides == Strides::odd; }},
    {"many_parts", "", kCombine, [](const Case& c) { return c.problem.combine.parts > 2; }},
    {"rotary_half", "rotary", kAppend, [](const Case& c) { return c.problem.append.rotary == Rotary::half; }},
    {"rotary_interleaved", "rotary", kAppend, [](const Case& c) { return c.problem.append.rotary == Rotary::interleaved; }},
    {"rotate_q", "", kAppend, [](const Case& c) { return c.values.rotate_q; }},
    {"state_bf16", "", kLinear, [](const Case& c) { return c.problem.linear.state_type == DType::bf16; }},
    {"state_kv", "", kLinear, [](const Case& c) { return c.problem.linear.state_layout == StateLayout::kv; }},
    {"many_tokens", "", kDecode, [](const Case& c) { return is_decode(c) && c.problem.seqlen_q > 1; }},
    {"many_chunks", "", kChunks, [](const Case& c) { return is_chunk(c) && c.problem.seqlen_q > 128; }},
    {"no_pool", "", kChunks, [](const Case& c) { return is_chunk(c) && c.problem.linear.states == 0; }},
    {"no_state_gradients", "", kChunkBackward, [](const Case& c) { return c.values.unbound_gradients; }},
    {"skipped_slots", "", kLinear,
     [](const Case& c) {
       const std::vector<std::int64_t>& slots = c.values.state_slots;
       return std::any_of(slots.begin(), slots.end(), [](std::int64_t slot) { return slot < 0; });
     }},
    {"dest_slots", "", kDecode | kChunk, [](const Case& c) { return !c.values.dest_slots.empty(); }},
    {"ring", "", kDecode, [](const Case& c) { return c.problem.linear.ring > 0; }},
    {"flush", "", kDecode, [](const Case& c) { return c.problem.only_flushes(); }},
    {"stochastic_rounding", "", kDecode, [](const Case& c) { return c.problem.linear.rounding == Rounding::stochastic; }},
    {"int64_slots", "", kLinear, [](const Case& c) { return c.values.long_slots; }},
    {"no_decay", "", kLinear, [](const Case& c) { return c.values.no_decay; }},
};
static_assert(std::size(kFeatures) <= kMostFeatures);

struct Exclusion {
  std::string_view a, b, reason;
};
constexpr std::string_view kBeyondItsLse = "keys that the forward left out may weigh more than fp32 holds";
/// Beyond groups and operations.
constexpr Exclusion kExclusions[] = {
    {"flush", "many_tokens", "a flush has none"},
    {"flush", "dest_slots", "a ring would have to move with the state"},
    {"ring", "dest_slots", "a ring would have to move with the state"},
    {"no_pool", "state_bf16", "without states they have no type"},
    {"no_pool", "skipped_slots", "without states there are no slots"},
    {"no_pool", "dest_slots", "without states there are no slots"},
    {"no_pool", "int64_slots", "without states there are no slots"},
    {"no_pool", "no_state_gradients", "without states they have no gradients"},
    {"far_offset", "mass_prior_lse", "an LSE far from 0 says nothing of a tile's mass"},
    {"alibi_extreme", "mass_prior_lse", "an LSE far from 0 says nothing of a tile's mass"},
    {"non_finite", "mass_prior_lse", "the masses of a row that is NaN are not promised"},
    {"non_finite", "sink_extreme", "what a weight of 0 makes of infinity is not promised"},
    {"non_finite", "alibi_extreme", "what a weight of 0 makes of infinity is not promised"},
    {"non_finite", "scale_not_positive", "drawn apart, for scales may be steep too"},
    {"mass_prior_lse", "inputs_scaled_up", "an LSE far from 0 says nothing of a tile's mass"},
    {"mass_prior_lse", "inputs_rising", "an LSE far from 0 says nothing of a tile's mass"},
    {"mass_prior_lse", "inputs_sink", "an LSE far from 0 says nothing of a tile's mass"},
    {"mass_prior_lse", "inputs_outliers", "an LSE far from 0 says nothing of a tile's mass"},
    {"far_offset", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"alibi_extreme", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"inputs_scaled_up", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"inputs_rising", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"inputs_sink", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"inputs_outliers", "skip_mass", "an LSE far from 0 says nothing of a tile's mass"},
    {"non_finite", "skip_mass", "drawn apart, as for masses by a prior LSE"},
    {"bwd_list_indices", "inputs_scaled_up", kBeyondItsLse},
    {"bwd_list_indices", "inputs_rising", kBeyondItsLse},
    {"bwd_list_indices", "inputs_sink", kBeyondItsLse},
    {"bwd_list_indices", "inputs_outliers", kBeyondItsLse},
    {"bwd_list_bitmask", "inputs_scaled_up", kBeyondItsLse},
    {"bwd_list_bitmask", "inputs_rising", kBeyondItsLse},
    {"bwd_list_bitmask", "inputs_sink", kBeyondItsLse},
    {"bwd_list_bitmask", "inputs_outliers", kBeyondItsLse},
    {"bwd_list_transposed", "inputs_scaled_up", kBeyondItsLse},
    {"bwd_list_transposed", "inputs_rising", kBeyondItsLse},
    {"bwd_list_transposed", "inputs_sink", kBeyondItsLse},
    {"bwd_list_transposed", "inputs_outliers", kBeyondItsLse},
    {"non_finite", "inputs_scaled_up", "what a weight of 0 makes of infinity is not promised"},
    {"non_finite", "inputs_rising", "what a weight of 0 makes of infinity is not promised"},
    {"non_finite", "inputs_sink", "what a weight of 0 makes of infinity is not promised"},
    {"non_finite", "inputs_outliers", "what a weight of 0 makes of infinity is not promised"},
    {"splits", "batch_invariant", "batch-invariant plans fix the split themselves"},
    {"splits", "next_indices", "a tile's mass needs whole rows"},
    {"splits", "next_bitmask", "a tile's mass needs whole rows"},
    {"splits", "mass_mean", "a tile's mass needs whole rows"},
    {"splits", "mass_rms", "a tile's mass needs whole rows"},
    {"splits", "mass_prior_lse", "a tile's mass needs whole rows"},
};

/// 8-bit elements are N(0, 1) before their descales; descales of blocks and tokens are those of one source.
bool meets_eight_bits(const Feature& a, const Feature& b) {
  const bool eight = a.group == "grain" || a.name == "fp8" || a.name == "int8" || a.name == "smooth";
  if (!eight) return false;
  if (b.group == "kv2" || b.name == "k_offset2") return a.group == "grain";
  const bool wide = b.name == "fp32" || b.name == "fp16" || b.name == "bf16" || b.name == "mixed_types";
  return wide || (b.group == "inputs" && b.name != "inputs_nan_tail");
}

/// What a skip state takes the place of.
constexpr std::string_view kNotBesideStates[] = {"list_indices",   "list_transposed", "list_heads_one", "list_heads_kv",
                                                 "list_batch_one", "list_full",       "next_indices",   "next_bitmask",
                                                 "mass_mean",      "mass_rms",        "mass_prior_lse", "splits"};

bool meets_a_state(const Feature& a, const Feature& b) {
  return a.group == "skip" &&
         std::find(std::begin(kNotBesideStates), std::end(kNotBesideStates), b.name) != std::end(kNotBesideStates);
}

}  // namespace

std::size_t feature_count() noexcept { return std::size(kFeatures); }

std::string_view feature_name(std::size_t feature) noexcept { return kFeatures[feature].name; }

FeatureSet features_of(const Case& of) {
  FeatureSet set;
  for (std::size_t i = 0; i < std::size(kFeatures); ++i) set[i] = kFeatures[i].present(of);
  return set;
}

std::string_view why_apart(std::size_t a, std::size_t b) noexcept {
  const Feature& x = kFeatures[a];
  const Feature& y = kFeatures[b];
  if (a == b) return "";
  if (!x.group.empty() && x.group == y.group) return "a problem has one of these";
  if ((x.operations & y.operations) == 0) return "of different operations";
  if (meets_eight_bits(x, y) || meets_eight_bits(y, x)) return "8-bit elements are drawn N(0, 1), of one source";
  if (meets_a_state(x, y) || meets_a_state(y, x)) return "a state has list and masses, of whole rows";
  for (const Exclusion& exclusion : kExclusions) {
    if (exclusion.a == x.name && exclusion.b == y.name) return exclusion.reason;
    if (exclusion.a == y.name && exclusion.b == x.name) return exclusion.reason;
  }
  return "";
}

}  // namespace tessera::cases
