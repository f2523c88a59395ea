// SPDX-License-Identifier: Apache-2.0
// combine: merges partial results (O, LSE) of the same queries into one.
#include <algorithm>

#include "bindings/rule_writer.h"
#include "bindings/validate_parts.h"
#include "operations/table.h"
#include "problem/shared_checks.h"
#include "problem/shared_keys.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

void parse(const LineReader& line, Problem& p) {
  read_sizes(line, p);
  p.sink = line.flag("sink");
  p.lse = line.flag("lse");
  read_promises(line, p);
  p.combine.parts = line.integer("parts").value_or(2);
}

void print(LineWriter& line, const Problem& p) {
  write_sizes(line, p);
  line.flag("sink", p.sink);
  line.flag("lse", p.lse);
  write_promises(line, p);
  line.integer("parts", p.combine.parts, 2);
}

void check(const Problem& p) {
  refuse_unused(p, {{"pass", p.pass != Pass::forward}, {"scale", p.scale.has_value()}, {"seqused_q", p.seqused_q}});
  check_size("combine.parts", p.combine.parts, 1);
  check_size("kv.seqlen", p.kv.seqlen, 0);
  KvSource unused;
  unused.seqlen = p.kv.seqlen;
  if (p.kv != unused) refuse_field("kv", "combine", "no layout of keys, combine reads none");
  const std::int64_t dim = std::max(p.head_dim_qk, p.head_dim_v);
  check_bytes("combine.parts", {p.combine.parts, p.batch, p.seqlen_q, p.heads_q, dim});
  check_bytes("combine.parts", {p.combine.parts, p.total_q, p.heads_q, dim});
}

std::string_view own_field(const Problem& p) { return p.combine != Combine{} ? "combine.parts" : ""; }

void tensors(RuleWriter& w, const Problem& p) {
  const std::int64_t parts = p.combine.parts;
  w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  if (p.lse) w.lse_rows(Slot::lse, Access::write);
  if (p.sink) w.require(Slot::sink, Access::read, DType::fp32, {p.heads_q});
  if (p.q_layout == Layout::varlen) {
    w.require(Slot::o_parts, Access::read, p.q_type, {parts, p.total_q, p.heads_q, p.head_dim_v});
    w.require(Slot::lse_parts, Access::read, DType::fp32, {parts, p.heads_q, p.total_q});
    // Rows are merged one by one, so the boundaries of sequences do not matter; a caller may leave them bound.
    w.allow(Slot::cu_seqlens_q, DType::int32, {p.batch + 1});
  } else {
    w.require(Slot::o_parts, Access::read, p.q_type, {parts, p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    w.require(Slot::lse_parts, Access::read, DType::fp32, {parts, p.batch, p.heads_q, p.seqlen_q});
  }
}

}  // namespace

const OperationRules kCombine = {
    .operation = Operation::combine,
    .name = "combine",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_field,
    .tensors = tensors,
    .check_values = check_query_lengths,
};

}  // namespace tessera::detail
