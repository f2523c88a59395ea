// SPDX-License-Identifier: Apache-2.0
// Problem::check: every rule that needs no bindings. Arguments in errors are the names of Problem's fields.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "problem/grammar.h"
#include "problem/linear_steps.h"
#include "problem/registered_callables.h"
#include "tessera/error.h"
#include "tessera/problem.h"

namespace tessera {
namespace {

using namespace detail;

[[noreturn]] void refuse(std::string_view argument, std::string got, std::string want) {
  throw Error(ErrorCode::invalid_argument, std::string(argument), std::move(got), std::move(want));
}

void check_size(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse(name, std::to_string(value), std::to_string(least) + " or more");
  if (value > kMaxSize) {
    throw Error(ErrorCode::overflow, std::string(name), std::to_string(value), "at most " + std::to_string(kMaxSize));
  }
}

void check_number(std::string_view name, float value, bool good, std::string_view want) {
  if (!good) refuse(name, std::to_string(value), std::string(want));
}

bool is_output_type(DType type) { return type == DType::fp32 || type == DType::fp16 || type == DType::bf16; }

bool is_input_type(DType type) {
  return is_output_type(type) || type == DType::e4m3 || type == DType::e5m2 || type == DType::int8;
}

void check_types(const Problem& p) {
  const struct {
    std::string_view name;
    DType type;
  } inputs[] = {{"q_type", p.q_type}, {"k_type", p.k_type}, {"v_type", p.v_type}};
  for (const auto& input : inputs) {
    if (!is_input_type(input.type)) {
      refuse(input.name, std::string(to_string(input.type)), "fp32, fp16, bf16, e4m3, e5m2 or int8");
    }
  }
  if (!is_output_type(p.o_type)) refuse("o_type", std::string(to_string(p.o_type)), "fp32, fp16 or bf16");
}

/// Rows of any operation; attention wants multiples of 8 besides.
void check_row_length(std::string_view name, std::int64_t dim) {
  if (dim < 1 || dim > 512) refuse(name, std::to_string(dim), "1 to 512");
}

void check_common(const Problem& p) {
  check_size("batch", p.batch, 0);
  check_size("seqlen_q", p.seqlen_q, 0);
  check_size("heads_q", p.heads_q, 1);
  check_size("heads_kv", p.heads_kv, 1);
  check_row_length("head_dim_qk", p.head_dim_qk);
  check_row_length("head_dim_v", p.head_dim_v);
  check_size("total_q", p.total_q, 0);
  if (p.q_layout == Layout::dense && p.total_q != 0) {
    refuse("total_q", std::to_string(p.total_q), "0 for the dense layout");
  }
  check_size("block_q", p.block_q, 1);
  check_size("block_kv", p.block_kv, 1);
  check_types(p);
}

void check_source(const Problem& p, const KvSource& kv, const std::string& name) {
  check_size(name + ".seqlen", kv.seqlen, 0);
  check_size(name + ".total", kv.total, 0);
  check_size(name + ".pages", kv.pages, 0);
  if (kv.layout != KvLayout::varlen && kv.total != 0) {
    refuse(name + ".total", std::to_string(kv.total), "0 unless the layout is varlen");
  }
  if (is_paged(kv.layout)) {
    check_size(name + ".page_size", kv.page_size, 1);
    if (kv.pages > std::numeric_limits<std::int32_t>::max()) {
      refuse(name + ".pages", std::to_string(kv.pages), "at most 2147483647, page ids are int32");
    }
  } else if (kv.page_size != 0 || kv.pages != 0) {
    refuse(name + ".page_size", std::to_string(kv.page_size) + " with " + std::to_string(kv.pages) + " pages",
           "0 unless the layout is paged");
  }
  if (default_seqused(p.operation, kv.layout) && !kv.seqused) {
    refuse(name + ".seqused", "false",
           p.operation == Operation::kv_append ? "true, the lengths before the append are bound"
                                               : "true for a page table, its lengths are bound");
  }
  if (p.operation == Operation::attention && kv.layout == KvLayout::paged_csr && kv.seqused) {
    refuse(name + ".seqused", "true", "false for CSR pages, their lengths come from last_page_len");
  }
}

void check_head_dim(std::string_view name, std::int64_t dim) {
  if (dim % 8 != 0) refuse(name, std::to_string(dim), "a multiple of 8 from 8 to 512");
}

void check_window(const Window& window) {
  for (const auto& bound : {window.left, window.right}) {
    if (bound && (*bound > kMaxPosition || *bound < -kMaxPosition)) {
      refuse("window", std::to_string(*bound), "an offset of at most 2^60 either way, or unbounded");
    }
  }
}

void check_scores_and_masks(const Problem& p) {
  if (p.scale) check_number("scale", *p.scale, std::isfinite(*p.scale), "a finite number");
  check_number("softcap", p.softcap, std::isfinite(p.softcap) && p.softcap >= 0.0F, "0 (none) or a finite cap above 0");
  check_number("dropout", p.dropout, p.dropout >= 0.0F && p.dropout < 1.0F, "a probability from 0 to below 1");
  check_callable_name("score", p.score);
  check_callable_name("mask", p.mask);
  check_window(p.window);
  if (p.chunk < 0 || p.chunk > kMaxPosition) {
    refuse("chunk", std::to_string(p.chunk), "0 (none) or keys of a chunk, at most 2^60");
  }
  if (!p.compressed_causal) return;
  check_size("compressed_causal.length", p.compressed_causal->length, 1);
  check_size("compressed_causal.stride", p.compressed_causal->stride, 1);
  const std::int64_t keys = p.kv.seqlen + (p.kv2 ? p.kv2->seqlen : 0);
  const auto last = checked_multiply(keys, p.compressed_causal->stride);
  if (!last || *last > kMaxPosition) {
    throw Error(ErrorCode::overflow, "compressed_causal.stride", std::to_string(p.compressed_causal->stride),
                "stride times keys of at most 2^60");
  }
}

void check_list(std::string_view name, const TileList& list) {
  if (!list && list != TileList{}) refuse(name, "heads, batch or full without a form", "a form, or no list at all");
}

void check_tiles(const Problem& p) {
  check_list("list", p.list);
  check_list("bwd_list", p.bwd_list);
  if (p.bwd_list && p.pass != Pass::backward) refuse("bwd_list", "a forward", "pass=backward");
  if (p.next == TileList::Form::transposed) refuse("next", "transposed", "indices or bitmask");
  check_number("next_threshold", p.next_threshold, std::isfinite(p.next_threshold) && p.next_threshold >= 0.0F,
               "a finite mass of 0 or more");
  const bool writes_next = p.next != TileList::Form::none;
  if (p.next_threshold > 0.0F && !writes_next) refuse("next_threshold", "no next list", "next=indices or next=bitmask");
  if (p.mass_prior_lse && !writes_next && p.mass == MassKind::none) {
    refuse("mass_prior_lse", "neither mass nor next", "mass=mean, mass=rms or a next list");
  }
  if ((p.list || p.bwd_list || writes_next) &&
      std::max(p.query_blocks(), p.key_blocks()) > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::overflow, "block_kv", "more than 2147483647 blocks", "larger blocks, indices are int32");
  }
}

void check_gradients(const Problem& p) {
  if (p.pass == Pass::forward) {
    if (p.dlse) refuse("dlse", "a forward", "pass=backward");
    if (p.grad_fp32) refuse("grad_fp32", "a forward", "pass=backward");
    if (p.accumulate) refuse("accumulate", "a forward", "pass=backward");
  }
  if (p.accumulate && !p.grad_fp32) refuse("accumulate", "gradients in the types of q, k, v", "grad=fp32");
}

void check_bytes(std::string_view name, std::initializer_list<std::int64_t> sizes, std::int64_t element) {
  if (checked_extent(sizes, element)) return;
  std::string got = "sizes";
  for (const std::int64_t size : sizes) got += " " + std::to_string(size);
  throw Error(ErrorCode::overflow, std::string(name), got, "a byte count that fits in 64 bits");
}

void check_source_bytes(const Problem& p, const KvSource& kv, const std::string& name) {
  const std::int64_t rows = kv.layout == KvLayout::dense ? kv.seqlen : kv.page_size;
  const std::int64_t outer = kv.layout == KvLayout::dense    ? p.batch
                             : kv.layout == KvLayout::varlen ? kv.total
                                                             : kv.pages;
  check_bytes(name, {outer, rows, p.heads_kv, std::max(p.head_dim_qk, p.head_dim_v)}, 8);
  check_bytes(name + ".seqlen", {p.batch, kv.seqlen, p.heads_kv}, 8);
}

/// Every tensor of the problem has a byte count that fits; 8 bytes stand for any element.
void check_products(const Problem& p) {
  const std::int64_t dim = std::max(p.head_dim_qk, p.head_dim_v);
  check_bytes("seqlen_q", {p.batch, p.seqlen_q, p.heads_q, dim}, 8);
  check_bytes("total_q", {p.total_q, p.heads_q, dim}, 8);
  if (p.operation == Operation::combine) {
    check_bytes("parts", {p.parts, p.batch, p.seqlen_q, p.heads_q, dim}, 8);
    check_bytes("parts", {p.parts, p.total_q, p.heads_q, dim}, 8);
    return;
  }
  if (p.is_linear()) {
    check_bytes("batch", {p.batch, p.heads_q, p.head_dim_qk, p.head_dim_v}, 8);
    check_bytes("slots", {p.slots, p.heads_q, p.head_dim_qk, p.head_dim_v}, 8);
    check_bytes("ring", {p.slots, p.heads_q, 2 * p.ring, dim}, 8);
    return;
  }
  check_source_bytes(p, p.kv, "kv");
  if (p.kv2) check_source_bytes(p, *p.kv2, "kv2");
  if (p.list || p.bwd_list || p.next != TileList::Form::none || p.mass != MassKind::none) {
    check_bytes("block_q", {p.batch, p.heads_q, p.query_blocks(), p.key_blocks()}, 8);
  }
}

void check_no_state(const Problem& p) {
  if (p.slots == 0 && p.state_type == DType::fp32 && p.state_layout == StateLayout::vk && p.ring == 0 &&
      p.rounding == Rounding::nearest) {
    return;
  }
  refuse(p.slots != 0                      ? "slots"
         : p.state_type != DType::fp32     ? "state_type"
         : p.ring != 0                     ? "ring"
         : p.rounding != Rounding::nearest ? "rounding"
                                           : "state_layout",
         std::string(word_of(kOperations, p.operation)),
         "linear_decode or linear_chunk; this field has no meaning here");
}

void check_attention(const Problem& p) {
  check_no_state(p);
  if (p.heads_q % p.heads_kv != 0) {
    refuse("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " query heads",
           "a divisor of heads_q");
  }
  check_head_dim("head_dim_qk", p.head_dim_qk);
  check_head_dim("head_dim_v", p.head_dim_v);
  check_source(p, p.kv, "kv");
  if (p.kv2) check_source(p, *p.kv2, "kv2");
  check_scores_and_masks(p);
  check_tiles(p);
  check_gradients(p);
  if (p.parts != 2) refuse("parts", std::to_string(p.parts), "2 (unset), only combine has parts");
  if (p.rotary != Rotary::none || p.rotary_dim != 0) refuse("rotary", "attention", "kv_append, which rotates new keys");
}

/// What the other operations share: no softmax of their own, so none of its fields.
void check_no_attention_fields(const Problem& p) {
  const std::string operation(word_of(kOperations, p.operation));
  const struct {
    std::string_view name;
    bool set;
  } fields[] = {{"pass", p.pass != Pass::forward && p.operation != Operation::linear_chunk},
                {"kv2", p.kv2.has_value()},
                {"scale", p.scale.has_value() && !p.is_linear()},
                {"softcap", p.softcap != 0.0F},
                {"alibi", p.alibi},
                {"score", !p.score.empty()},
                {"window", p.window != Window{}},
                {"compressed_causal", p.compressed_causal.has_value()},
                {"chunk", p.chunk != 0},
                {"mask", !p.mask.empty()},
                {"dropout", p.dropout != 0.0F},
                {"list", p.list != TileList{}},
                {"bwd_list", p.bwd_list != TileList{}},
                {"next", p.next != TileList::Form::none},
                {"next_threshold", p.next_threshold != 0.0F},
                {"mass", p.mass != MassKind::none},
                {"mass_prior_lse", p.mass_prior_lse},
                {"dlse", p.dlse},
                {"grad_fp32", p.grad_fp32},
                {"accumulate", p.accumulate}};
  for (const auto& field : fields) {
    if (field.set) refuse(field.name, operation, "attention; this field has no meaning here");
  }
}

void check_combine(const Problem& p) {
  check_no_attention_fields(p);
  check_no_state(p);
  check_size("parts", p.parts, 1);
  if (p.kv.layout != KvLayout::dense || p.kv.total != 0 || p.kv.page_size != 0 || p.kv.pages != 0 || p.kv.seqused) {
    refuse("kv", "combine", "no layout of keys, combine reads none");
  }
  if (p.seqused_q) refuse("seqused_q", "combine", "attention or kv_append");
  if (p.rotary != Rotary::none || p.rotary_dim != 0) refuse("rotary", "combine", "kv_append");
  check_size("kv.seqlen", p.kv.seqlen, 0);
}

void check_kv_append(const Problem& p) {
  check_no_attention_fields(p);
  check_no_state(p);
  check_source(p, p.kv, "kv");
  if (p.kv.layout == KvLayout::varlen) refuse("kv.layout", "varlen", "dense, a page table or CSR pages");
  if (p.sink) refuse("sink", "kv_append", "attention or combine");
  if (p.lse) refuse("lse", "kv_append", "attention or combine");
  if (p.parts != 2) refuse("parts", std::to_string(p.parts), "2 (unset), only combine has parts");
  if (p.rotary == Rotary::none) {
    if (p.rotary_dim != 0) refuse("rotary_dim", std::to_string(p.rotary_dim), "0 without rotary");
  } else if (p.rotary_dim < 2 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim_qk) {
    refuse("rotary_dim", std::to_string(p.rotary_dim), "an even number from 2 to head_dim_qk");
  }
}

/// Tokens of a step, and those that wait beside the state.
void check_step(const Problem& p) {
  if (p.seqlen_q > kMostStepTokens || (p.seqlen_q < 1 && !p.only_flushes())) {
    refuse("seqlen_q", std::to_string(p.seqlen_q), "1 to 8 tokens a step, or with a ring 0, which empties it");
  }
  if (p.ring != 0 && (p.ring < std::max<std::int64_t>(p.seqlen_q, 1) || p.ring > kLongestRing)) {
    refuse("ring", std::to_string(p.ring), "0 for none, or seqlen_q to 64 tokens");
  }
  if (p.rounding == Rounding::stochastic && p.state_type != DType::bf16) {
    refuse("rounding", "stochastic for states in " + std::string(to_string(p.state_type)), "nearest, or state=bf16");
  }
}

void check_linear(const Problem& p) {
  check_no_attention_fields(p);
  const bool decode = p.operation == Operation::linear_decode;
  if (decode) check_step(p);
  if (p.heads_kv != p.heads_q) {
    refuse("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " query heads",
           "as many as heads_q, each head has a state");
  }
  check_head_dim("head_dim_qk", p.head_dim_qk);
  check_head_dim("head_dim_v", p.head_dim_v);
  check_size("slots", p.slots, 0);
  if (p.state_type != DType::fp32 && p.state_type != DType::bf16) {
    refuse("state_type", std::string(to_string(p.state_type)), "fp32 or bf16");
  }
  if (p.scale) check_number("scale", *p.scale, std::isfinite(*p.scale), "a finite number");
  const struct {
    std::string_view name;
    bool set;
  } fields[] = {{"q_layout", decode && p.q_layout != Layout::dense},
                {"ring", !decode && p.ring != 0},
                {"rounding", !decode && p.rounding != Rounding::nearest},
                {"seqused_q", p.seqused_q},
                {"kv", p.kv != KvSource{}},
                {"sink", p.sink},
                {"lse", p.lse},
                {"parts", p.parts != 2},
                {"rotary", p.rotary != Rotary::none},
                {"rotary_dim", p.rotary_dim != 0}};
  for (const auto& field : fields) {
    if (field.set) {
      refuse(field.name, std::string(word_of(kOperations, p.operation)),
             "another operation; this field has no meaning here");
    }
  }
}

}  // namespace

void Problem::check() const {
  check_common(*this);
  switch (operation) {
    case Operation::attention:
      check_attention(*this);
      break;
    case Operation::combine:
      check_combine(*this);
      break;
    case Operation::kv_append:
      check_kv_append(*this);
      break;
    case Operation::linear_decode:
    case Operation::linear_chunk:
      check_linear(*this);
      break;
  }
  check_products(*this);
}

}  // namespace tessera
