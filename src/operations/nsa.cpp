// SPDX-License-Identifier: Apache-2.0
#include "operations/nsa.h"

#include "problem/grammar.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

constexpr SourceDefaults kTokens = {};

}  // namespace

void read_key_tokens(const LineReader& line, Problem& p) {
  p.batch = line.integer("b").value_or(1);
  const auto tokens = line.integer("sk");
  if (!tokens) line.fail("sk", "no value", "sk=N, the tokens of the longest sequence");
  p.kv.seqlen = *tokens;
  p.heads_kv = line.integer("hkv").value_or(1);
  p.heads_q = p.heads_kv;
  p.head_dim_qk = line.integer("d").value_or(64);
  p.head_dim_v = line.integer("dv").value_or(p.head_dim_qk);
  read_types(line, p);
  p.kv.layout = line.word("kv", kKvLayouts).value_or(KvLayout::dense);
  p.kv.total = or_default(line, "tk", default_total(p, p.kv));
}

void write_key_tokens(LineWriter& line, const Problem& p) {
  line.integer("b", p.batch, 1);
  line.integer("sk", p.kv.seqlen);
  line.integer("hkv", p.heads_kv, 1);
  line.integer("d", p.head_dim_qk, 64);
  line.integer("dv", p.head_dim_v, p.head_dim_qk);
  write_types(line, p);
  if (p.kv.layout != kTokens.layout) line.word("kv", word_of(kKvLayouts, p.kv.layout));
  line.integer("tk", p.kv.total, default_total(p, p.kv));
}

void read_compression(const LineReader& line, Problem& p) {
  p.nsa.length = line.integer("length").value_or(Nsa{}.length);
  p.nsa.stride = line.integer("stride").value_or(p.nsa.length);
}

void write_compression(LineWriter& line, const Problem& p) {
  line.integer("length", p.nsa.length, Nsa{}.length);
  line.integer("stride", p.nsa.stride, p.nsa.length);
}

void check_compression(const Problem& p) {
  check_source(p, p.kv, "kv");
  if (is_paged(p.kv.layout)) refuse_field("kv.layout", "pages", "dense or varlen");
  if (p.kv.seqused) refuse_field("kv.seqused", "true", "false, lengths of tokens to compress come from cu_seqlens_k");
  check_size("nsa.length", p.nsa.length, 1);
  check_size("nsa.stride", p.nsa.stride, 1);
  if (p.nsa.stride > p.nsa.length) {
    refuse_field("nsa.stride", std::to_string(p.nsa.stride),
                 "at most nsa.length, " + std::to_string(p.nsa.length) + ", or tokens would be in no block");
  }
}

std::string_view own_nsa_field(const Problem& p) {
  const Nsa none;
  if (p.nsa.length != none.length) return "nsa.length";
  if (p.nsa.stride != none.stride) return "nsa.stride";
  if (p.nsa.project) return "nsa.project";
  if (p.nsa.block != none.block) return "nsa.block";
  if (p.nsa.top != none.top) return "nsa.top";
  if (p.nsa.tile != none.tile) return "nsa.tile";
  if (p.nsa.query_heads) return "nsa.query_heads";
  if (p.nsa.score != none.score) return "nsa.score";
  if (p.nsa.reduce != none.reduce) return "nsa.reduce";
  if (p.nsa.visible != none.visible) return "nsa.visible";
  if (p.nsa.initial != none.initial) return "nsa.initial";
  if (p.nsa.local != none.local) return "nsa.local";
  if (p.nsa.causal) return "nsa.causal";
  if (p.nsa.compressed_top != none.compressed_top) return "nsa.compressed_top";
  if (p.nsa.compressed_block != none.compressed_block) return "nsa.compressed_block";
  return p.nsa.gate != none.gate ? "nsa.gate" : "";
}

void refuse_nsa_fields_of_others(const Problem& p, void (*forget)(Nsa& nsa)) {
  Problem others = p;
  forget(others.nsa);
  const std::string_view field = own_nsa_field(others);
  if (!field.empty()) refuse_unused(p, {{field, true}});
}

SlotRule& pooled_rows(RuleWriter& w, const Problem& p, Slot slot, RuleWriter::Access access, DType dtype,
                      std::int64_t dim) {
  if (p.kv.layout == KvLayout::varlen) {
    return w.require(slot, access, dtype, {p.kv.total / p.nsa.stride, p.heads_kv, dim});
  }
  return w.require(slot, access, dtype, {p.batch, compressed_blocks(p.nsa, p.kv.seqlen), p.heads_kv, dim});
}

}  // namespace tessera::detail
