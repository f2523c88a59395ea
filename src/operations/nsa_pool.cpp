// SPDX-License-Identifier: Apache-2.0
// nsa_pool: the compressed keys and values of native sparse attention, which are means of blocks of tokens, and their
// gradient.
#include "bindings/validate_parts.h"
#include "operations/nsa.h"
#include "operations/table.h"
#include "problem/shared_checks.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

void parse(const LineReader& line, Problem& p) {
  read_pass(line, p);
  read_key_tokens(line, p);
  read_compression(line, p);
  p.nsa.project = line.flag("project");
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  write_pass(line, p);
  write_key_tokens(line, p);
  write_compression(line, p);
  line.flag("project", p.nsa.project);
  write_promises(line, p);
}

void check(const Problem& p) {
  refuse_unused(p, {{"scale", p.scale.has_value()},
                    {"sink", p.sink},
                    {"lse", p.lse},
                    {"seqlen_q", p.seqlen_q != 0},
                    {"q_layout", p.q_layout != Layout::dense},
                    {"seqused_q", p.seqused_q},
                    {"heads_q", p.heads_q != p.heads_kv}});
  refuse_nsa_fields_of_others(p, [](Nsa& nsa) {
    nsa.length = nsa.stride = Nsa{}.length;
    nsa.project = false;
  });
  check_compression(p);
}

void tensors(RuleWriter& w, const Problem& p) {
  const bool forward = p.pass == Pass::forward;
  const auto keys = [&](Slot tokens, Slot pooled, Slot projection, DType dtype, std::int64_t dim) {
    if (forward || p.nsa.project) w.key_rows(tokens, Access::read, p.kv, dtype, dim);
    if (forward) pooled_rows(w, p, pooled, Access::write, dtype, dim);
    if (p.nsa.project) w.require(projection, Access::read, dtype, {p.heads_kv, dim, dim});
  };
  keys(Slot::k, Slot::k_pooled, Slot::k_projection, p.k_type, p.head_dim_qk);
  keys(Slot::v, Slot::v_pooled, Slot::v_projection, p.v_type, p.head_dim_v);
  w.key_lengths(p.kv, source_slots(false), Presence::optional);
  if (forward) {
    if (p.kv.layout == KvLayout::varlen) w.require(Slot::cu_blocks, Access::write, DType::int32, {p.batch + 1});
    return;
  }
  const auto gradients = [&](Slot pooled, Slot tokens, Slot projection, DType dtype, std::int64_t dim) {
    pooled_rows(w, p, pooled, Access::read, dtype, dim);
    w.key_rows(tokens, Access::write, p.kv, dtype, dim);
    if (p.nsa.project) w.require(projection, Access::write, DType::fp32, {p.heads_kv, dim, dim});
  };
  gradients(Slot::dk_pooled, Slot::dk, Slot::dk_projection, p.k_type, p.head_dim_qk);
  gradients(Slot::dv_pooled, Slot::dv, Slot::dv_projection, p.v_type, p.head_dim_v);
}

void check_values(const Problem& p, const Bindings& bindings) {
  check_source_lengths(p, p.kv, source_slots(false), bindings);
}

}  // namespace

const OperationRules kNsaPool = {
    .operation = Operation::nsa_pool,
    .name = "nsa_pool",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_nsa_field,
    .tensors = tensors,
    .check_values = check_values,
};

}  // namespace tessera::detail
