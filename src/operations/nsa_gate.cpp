// SPDX-License-Identifier: Apache-2.0
// nsa_gate: the sum of the three branches of native sparse attention, each times its gate; and its gradient.
#include <algorithm>

#include "bindings/validate_parts.h"
#include "operations/nsa.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

constexpr Word<GateKind> kGates[] = {
    {"sigmoid", GateKind::sigmoid}, {"given", GateKind::given}, {"mean", GateKind::mean}};

void parse(const LineReader& line, Problem& p) {
  read_pass(line, p);
  read_sizes(line, p);
  p.nsa.gate = line.word("gate", kGates).value_or(GateKind::sigmoid);
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  write_pass(line, p);
  write_sizes(line, p);
  if (p.nsa.gate != GateKind::sigmoid) line.word("gate", word_of(kGates, p.nsa.gate));
  write_promises(line, p);
}

void check(const Problem& p) {
  refuse_unused(p, {{"scale", p.scale.has_value()}, {"sink", p.sink}, {"lse", p.lse}, {"seqused_q", p.seqused_q}});
  refuse_nsa_fields_of_others(p, [](Nsa& nsa) { nsa.gate = GateKind::sigmoid; });
  check_size("kv.seqlen", p.kv.seqlen, 0);
  KvSource unused;
  unused.seqlen = p.kv.seqlen;
  if (p.kv != unused) refuse_field("kv", "nsa_gate", "no layout of keys, nsa_gate reads none");
  const std::int64_t dim = std::max(p.head_dim_qk, p.head_dim_v);
  check_bytes("seqlen_q", {kNsaBranches, p.batch, p.seqlen_q, p.heads_q, dim});
  check_bytes("total_q", {kNsaBranches, p.total_q, p.heads_q, dim});
}

void branches(RuleWriter& w, const Problem& p, Slot slot, Access access) {
  if (p.q_layout == Layout::varlen) {
    w.require(slot, access, p.v_type, {kNsaBranches, p.total_q, p.heads_q, p.head_dim_v});
  } else {
    w.require(slot, access, p.v_type, {kNsaBranches, p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
  }
}

void tensors(RuleWriter& w, const Problem& p) {
  const bool forward = p.pass == Pass::forward;
  branches(w, p, Slot::o_parts, Access::read);
  w.query_lengths();
  if (p.nsa.gate == GateKind::sigmoid) {
    w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
    w.require(Slot::gate_weight, Access::read, p.q_type, {p.heads_q, kNsaBranches, p.head_dim_qk});
  } else if (p.nsa.gate == GateKind::given) {
    w.query_rows(Slot::gates, Access::read, DType::fp32, p.heads_q, kNsaBranches);
  }
  if (forward) {
    w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
    return;
  }
  w.query_rows(Slot::dout, Access::read, p.o_type, p.heads_q, p.head_dim_v);
  branches(w, p, Slot::do_parts, Access::write);
  if (p.nsa.gate == GateKind::sigmoid) {
    w.query_rows(Slot::dq, Access::write, p.q_type, p.heads_q, p.head_dim_qk);
    w.require(Slot::dgate_weight, Access::write, DType::fp32, {p.heads_q, kNsaBranches, p.head_dim_qk});
  } else if (p.nsa.gate == GateKind::given) {
    w.query_rows(Slot::dgates, Access::write, DType::fp32, p.heads_q, kNsaBranches);
  }
}

}  // namespace

const OperationRules kNsaGate = {
    .operation = Operation::nsa_gate,
    .name = "nsa_gate",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_nsa_field,
    .tensors = tensors,
    .check_values = check_query_lengths,
};

}  // namespace tessera::detail
