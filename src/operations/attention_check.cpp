// SPDX-License-Identifier: Apache-2.0
// The rules of an attention problem.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/element.h"
#include "operations/attention.h"
#include "operations/descales.h"
#include "problem/grammar.h"
#include "problem/registered_callables.h"
#include "problem/shared_checks.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

void check_number(std::string_view name, float value, bool good, std::string_view want) {
  if (!good) refuse_field(name, std::to_string(value), std::string(want));
}

void check_keys(const Problem& p, const KvSource& kv, const std::string& name) {
  check_source(p, kv, name);
  if (kv.layout == KvLayout::paged_csr && kv.seqused) {
    refuse_field(name + ".seqused", "true", "false for CSR pages, their lengths come from last_page_len");
  }
}

void check_window(const Window& window) {
  for (const auto& bound : {window.left, window.right}) {
    if (bound && (*bound > kMaxPosition || *bound < -kMaxPosition)) {
      refuse_field("window", std::to_string(*bound), "an offset of at most 2^60 either way, or unbounded");
    }
  }
}

void check_compressed_causal(const Problem& p, const CompressedCausal& mask) {
  check_size("compressed_causal.length", mask.length, 1);
  check_size("compressed_causal.stride", mask.stride, 1);
  const std::int64_t keys = p.kv.seqlen + (p.kv2 ? p.kv2->seqlen : 0);
  const auto last = checked_multiply(keys, mask.stride);
  if (!last || *last > kMaxPosition) {
    throw Error(ErrorCode::overflow, "compressed_causal.stride", std::to_string(mask.stride),
                "stride times keys of at most 2^60");
  }
}

void check_scores_and_masks(const Problem& p) {
  check_scale(p);
  check_number("softcap", p.softcap, std::isfinite(p.softcap) && p.softcap >= 0.0F, "0 (none) or a finite cap above 0");
  check_number("dropout", p.dropout, p.dropout >= 0.0F && p.dropout < 1.0F, "a probability from 0 to below 1");
  check_callable_name("score", p.score);
  check_callable_name("mask", p.mask);
  check_window(p.window);
  if (p.chunk < 0 || p.chunk > kMaxPosition) {
    refuse_field("chunk", std::to_string(p.chunk), "0 (none) or keys of a chunk, at most 2^60");
  }
  if (p.compressed_causal) check_compressed_causal(p, *p.compressed_causal);
}

void check_list(std::string_view name, const TileList& list) {
  if (!list && list != TileList{}) {
    refuse_field(name, "heads, batch or full without a form", "a form, or no list at all");
  }
}

void check_skip(const Problem& p) {
  if (!p.skip) {
    if (p.skip != SkipRule{}) refuse_field("skip", "own_lse or growth without a rule", "mass, or nothing");
    return;
  }
  const bool mass = p.skip.kind == SkipRule::Kind::mass;
  if (p.pass != Pass::forward) {
    refuse_field("skip", "a backward", "a forward; a backward takes the state's list by list=bitmask");
  }
  if (p.list != TileList{.form = TileList::Form::bitmask}) {
    refuse_field("skip", "another list", "list=bitmask, by query head and batch and without full tiles");
  }
  if (p.mass != MassKind::none || p.next != TileList::Form::none) {
    refuse_field("skip", "mass or next beside it", "neither: the state holds both");
  }
  if (!mass && (p.skip.own_lse || p.skip.growth != SkipRule{}.growth)) {
    refuse_field("skip", "own_lse or growth for the rule threshold", "the rule mass, which remembers masses");
  }
  if (p.skip.growth < 0 || p.skip.growth > 255) {
    refuse_field("skip.growth", std::to_string(p.skip.growth), "0 (never comes back) to 255 eighths of an octave");
  }
}

void check_tiles(const Problem& p) {
  check_size("block_q", p.block_q, 1);
  check_size("block_kv", p.block_kv, 1);
  check_list("list", p.list);
  check_list("bwd_list", p.bwd_list);
  if (p.bwd_list && p.pass != Pass::backward) refuse_field("bwd_list", "a forward", "pass=backward");
  if (p.next == TileList::Form::transposed) refuse_field("next", "transposed", "indices or bitmask");
  check_number("next_threshold", p.next_threshold, std::isfinite(p.next_threshold) && p.next_threshold >= 0.0F,
               "a finite mass of 0 or more");
  check_skip(p);
  const bool writes_next = p.next != TileList::Form::none;
  if (p.next_threshold > 0.0F && !writes_next) {
    refuse_field("next_threshold", "no next list", "next=indices or next=bitmask");
  }
  if (p.mass_prior_lse && !writes_next && p.mass == MassKind::none) {
    refuse_field("mass_prior_lse", "neither mass nor next", "mass=mean, mass=rms or a next list");
  }
  const bool lists = p.list || p.bwd_list || writes_next;
  if (lists && std::max(p.query_blocks(), p.key_blocks()) > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::overflow, "block_kv", "more than 2147483647 blocks", "larger blocks, indices are int32");
  }
  if (lists || p.mass != MassKind::none) {
    check_bytes("block_q", {p.batch, p.heads_q, p.query_blocks(), p.key_blocks()});
  }
}

void check_gradients(const Problem& p) {
  if (p.pass == Pass::forward) {
    if (p.dlse) refuse_field("dlse", "a forward", "pass=backward");
    if (p.grad_fp32) refuse_field("grad_fp32", "a forward", "pass=backward");
    if (p.accumulate) refuse_field("accumulate", "a forward", "pass=backward");
  }
  if (p.accumulate && !p.grad_fp32) refuse_field("accumulate", "gradients in the types of q, k, v", "grad=fp32");
}

bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

/// Whether attention takes this combination of types, with 8-bit types among them.
bool types_match(const Problem& p) {
  if (p.k_type == DType::int8) return p.q_type == DType::int8 && (is_result(p.v_type) || is_fp8(p.v_type));
  if (p.q_type == DType::e4m3) return p.k_type == DType::e4m3 && is_fp8(p.v_type);
  return is_result(p.q_type) && is_fp8(p.k_type) && is_fp8(p.v_type);  // an 8-bit KV cache
}

void check_quantization(const Problem& p) {
  const Quantization& q = p.quantization;
  if (!is_quantised(p.q_type) && !is_quantised(p.k_type) && !is_quantised(p.v_type)) {
    if (q != Quantization{}) refuse_field("quantization", "no operand of 8 bits", "k_type e4m3, e5m2 or int8");
    return;
  }
  if (!types_match(p)) {
    refuse_field("k_type",
                 "q " + std::string(to_string(p.q_type)) + ", k " + std::string(to_string(p.k_type)) + ", v " +
                     std::string(to_string(p.v_type)),
                 "q and k e4m3 with v e4m3 or e5m2, q and k int8 with any v but int8, or k and v e4m3 or e5m2 with q " +
                     result_types());
  }
  if (p.pass == Pass::backward) {
    refuse_field("pass", "a backward of 8-bit operands", "a forward; a backward takes the dequantised values");
  }
  check_grain(q);
  if (q.grain == Grain::head) return;
  if (p.kv2) refuse_field("quantization.grain", "a second source of keys", "Grain::head, which both sources share");
  if (q.grain == Grain::block && is_paged(p.kv.layout) && p.kv.page_size % q.block != 0) {
    refuse_field("quantization.block", std::to_string(q.block),
                 "a divisor of the " + std::to_string(p.kv.page_size) + " tokens of a page");
  }
}

}  // namespace

void check_attention(const Problem& p) {
  if (p.heads_q % p.heads_kv != 0) {
    refuse_field("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " query heads",
                 "a divisor of heads_q");
  }
  check_head_dim("head_dim_qk", p.head_dim_qk);
  check_head_dim("head_dim_v", p.head_dim_v);
  check_keys(p, p.kv, "kv");
  if (p.kv2) check_keys(p, *p.kv2, "kv2");
  check_scores_and_masks(p);
  check_tiles(p);
  check_gradients(p);
  check_quantization(p);
  if (p.residual && p.o_type == DType::fp32) {
    refuse_field("residual", "an o of fp32, which loses nothing", "o in fp16 or bf16, or no residual");
  }
}

Support attention_is_defined(const Problem& p) {
  const RegisteredCallables callables(p);
  if (const int extras = callables.score_extras() + callables.mask_extras(); extras > kMaxExtras) {
    return Support::no("score and mask have " + std::to_string(extras) + " extra tensors together; want at most " +
                       std::to_string(kMaxExtras));
  }
  if (p.pass == Pass::forward) return Support::yes();
  if (p.mass != MassKind::none || p.next != TileList::Form::none) {
    return Support::no("a backward writes neither tile mass nor a next list; ask the forward for them");
  }
  if (is_paged(p.kv.layout) || (p.kv2 && is_paged(p.kv2->layout))) {
    return Support::no("a backward through paged keys: a page may belong to several sequences");
  }
  return Support::yes();
}

}  // namespace tessera::detail
