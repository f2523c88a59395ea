// SPDX-License-Identifier: Apache-2.0
// kv_append: appends new keys and values to a cache; with `rotary`, it rotates the keys and perhaps the queries.
#include "base/checked.h"
#include "bindings/rule_writer.h"
#include "bindings/validate_parts.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"
#include "problem/shared_keys.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

constexpr Word<Rotary> kRotaries[] = {{"half", Rotary::half}, {"interleaved", Rotary::interleaved}};
constexpr SourceDefaults kCache = {KvLayout::dense, true};  // lengths before the append are always bound

void parse(const LineReader& line, Problem& p) {
  read_sizes(line, p);
  p.seqused_q = line.flag("seqused_q");
  read_source(line, p, p.kv, kCache);
  read_promises(line, p);
  if (const auto text = line.value("rotary")) {
    const auto fields = split(*text, ':');
    if (fields.size() != 2) line.reject("rotary", *text, "half:DIM or interleaved:DIM");
    p.append.rotary = line.to_word("rotary", fields[0], kRotaries);
    p.append.rotary_dim = line.to_integer("rotary", fields[1]);
  }
}

void print(LineWriter& line, const Problem& p) {
  write_sizes(line, p);
  line.flag("seqused_q", p.seqused_q);
  write_source(line, p, p.kv, kCache);
  write_promises(line, p);
  if (p.append.rotary == Rotary::none) return;
  line.word("rotary", std::string(word_of(kRotaries, p.append.rotary)) + ":" + std::to_string(p.append.rotary_dim));
}

void check(const Problem& p) {
  refuse_unused(p,
                {{"pass", p.pass != Pass::forward}, {"scale", p.scale.has_value()}, {"sink", p.sink}, {"lse", p.lse}});
  check_source(p, p.kv, "kv");
  if (!p.kv.seqused) refuse_field("kv.seqused", "false", "true, the lengths before the append are bound");
  if (p.kv.layout == KvLayout::varlen) refuse_field("kv.layout", "varlen", "dense, a page table or CSR pages");
  const std::int64_t dim = p.append.rotary_dim;
  if (p.append.rotary == Rotary::none) {
    if (dim != 0) refuse_field("append.rotary_dim", std::to_string(dim), "0 without rotary");
  } else if (dim < 2 || dim % 2 != 0 || dim > p.head_dim_qk) {
    refuse_field("append.rotary_dim", std::to_string(dim), "an even number from 2 to head_dim_qk");
  }
}

std::string_view own_field(const Problem& p) {
  if (p.append.rotary != Rotary::none) return "append.rotary";
  return p.append.rotary_dim != 0 ? "append.rotary_dim" : "";
}

void tensors(RuleWriter& w, const Problem& p) {
  w.query_lengths();
  w.key_rows(Slot::k, Access::update, p.kv, p.k_type, p.head_dim_qk);
  w.key_rows(Slot::v, Access::update, p.kv, p.v_type, p.head_dim_v);
  w.key_lengths(p.kv, source_slots(false), Presence::optional);
  w.query_rows(Slot::k_new, Access::read, p.k_type, p.heads_kv, p.head_dim_qk);
  w.query_rows(Slot::v_new, Access::read, p.v_type, p.heads_kv, p.head_dim_v);
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk).presence = Presence::optional;
  w.query_rows(Slot::q_rotated, Access::write, p.q_type, p.heads_q, p.head_dim_qk).presence = Presence::optional;
  if (p.append.rotary == Rotary::none) return;
  for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) {
    SlotRule& rule = w.require(slot, Access::read, p.k_type, {0, p.append.rotary_dim / 2});
    rule.at_least = 1U;
    rule.or_fp32 = true;
  }
}

void check_bound(const Problem& /*problem*/, const Bindings& bindings) {
  if (static_cast<bool>(bindings[Slot::q]) == static_cast<bool>(bindings[Slot::q_rotated])) return;
  throw Error(ErrorCode::invalid_argument, bindings[Slot::q] ? "q_rotated" : "q", "unbound",
              "both q and q_rotated, or neither");
}

/// Throws unless sequence b has pages for `after` tokens.
void check_pages(const Problem& p, const Bindings& bindings, std::int64_t b, std::int64_t after) {
  if (p.kv.layout == KvLayout::paged_table) {
    check_table_row(Slot::page_table, bindings[Slot::page_table], p.kv, b, after);
  } else if (p.kv.layout == KvLayout::paged_csr) {
    const Tensor& indptr = bindings[Slot::page_indptr];
    const std::int64_t pages = int32_at(indptr, b + 1) - int32_at(indptr, b);
    const std::int64_t needed = ceil_div(after, p.kv.page_size);
    if (needed <= pages) return;
    refuse_element(Slot::page_indptr, b + 1, int32_at(indptr, b + 1),
                   std::to_string(needed) + " pages for sequence " + std::to_string(b));
  }
}

void check_rotary(const Bindings& bindings, std::int64_t b, std::int64_t after) {
  for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) {
    if (bindings[slot].shape[0] >= after) continue;
    throw Error(ErrorCode::out_of_range, std::string(to_string(slot)), bindings[slot].describe(),
                std::to_string(after) + " positions for sequence " + std::to_string(b));
  }
}

/// Checks that the new tokens of every sequence have room behind those in the cache, and rows in the rotary tables.
void check_values(const Problem& p, const Bindings& bindings) {
  check_query_lengths(p, bindings);
  check_cache_lengths(p, p.kv, source_slots(false), bindings);
  const Tensor& before = bindings[Slot::seqused_k];
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t fresh = length_of(bindings[Slot::cu_seqlens_q], bindings[Slot::seqused_q], p.seqlen_q, b);
    const std::int64_t after = int32_at(before, b) + fresh;
    if (after > p.kv.seqlen) {
      refuse_element(Slot::seqused_k, b, int32_at(before, b),
                     "room for " + std::to_string(fresh) + " new tokens in a cache of " + std::to_string(p.kv.seqlen));
    }
    check_pages(p, bindings, b, after);
    if (p.append.rotary != Rotary::none && fresh > 0) check_rotary(bindings, b, after);
  }
}

}  // namespace

const OperationRules kKvAppend = {
    .operation = Operation::kv_append,
    .name = "kv_append",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_field,
    .tensors = tensors,
    .check_bound = check_bound,
    .check_values = check_values,
};

}  // namespace tessera::detail
