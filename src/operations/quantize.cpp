// SPDX-License-Identifier: Apache-2.0
// quantize: converts the rows of a tensor to 8 bits and descales.
#include "base/element.h"
#include "bindings/validate_parts.h"
#include "operations/descales.h"
#include "operations/table.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"
#include "problem/shared_keys.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

void parse(const LineReader& line, Problem& p) {
  p.batch = line.integer("b").value_or(1);
  const auto seqlen = line.integer("sq");
  if (!seqlen) line.fail("sq", "no value", "sq=N, the number of rows");
  p.seqlen_q = *seqlen;
  p.heads_q = line.integer("hq").value_or(1);
  p.heads_kv = line.integer("hkv").value_or(p.heads_q);
  p.head_dim_qk = p.head_dim_v = line.integer("d").value_or(64);
  p.q_type = parse_dtype(line.value("dtype").value_or("fp32"), "dtype");
  p.k_type = p.v_type = p.q_type;
  p.o_type = parse_dtype(line.value("to").value_or("e4m3"), "to");
  p.q_layout = line.word("layout", kLayouts).value_or(Layout::dense);
  p.total_q = or_default(line, "tq", default_total_q(p));
  p.seqused_q = line.flag("seqused_q");
  read_descales(line, p);
  p.quantization.hadamard = line.flag("hadamard");
  p.quantization.given = line.flag("given");
  p.quantization.counts = line.flag("saturated");
  read_promises(line, p);
}

void print(LineWriter& line, const Problem& p) {
  line.integer("b", p.batch, 1);
  line.integer("sq", p.seqlen_q);
  line.integer("hq", p.heads_q, 1);
  line.integer("hkv", p.heads_kv, p.heads_q);
  line.integer("d", p.head_dim_qk, 64);
  if (p.q_type != DType::fp32) line.word("dtype", to_string(p.q_type));
  if (p.o_type != DType::e4m3) line.word("to", to_string(p.o_type));
  if (p.q_layout != Layout::dense) line.word("layout", word_of(kLayouts, p.q_layout));
  line.integer("tq", p.total_q, default_total_q(p));
  line.flag("seqused_q", p.seqused_q);
  write_descales(line, p);
  line.flag("hadamard", p.quantization.hadamard);
  line.flag("given", p.quantization.given);
  line.flag("saturated", p.quantization.counts);
  write_promises(line, p);
}

void check(const Problem& p) {
  refuse_unused(p, {{"scale", p.scale.has_value()}, {"sink", p.sink}, {"lse", p.lse}, {"kv", p.kv != KvSource{}}});
  if (p.pass != Pass::forward) refuse_field("pass", "backward", "forward; rounding has no gradient");
  if (!is_result(p.q_type)) refuse_field("q_type", std::string(to_string(p.q_type)), result_types());
  if (p.k_type != p.q_type || p.v_type != p.q_type) refuse_field("k_type", "another type than q_type", "q_type");
  if (p.head_dim_v != p.head_dim_qk) refuse_field("head_dim_v", std::to_string(p.head_dim_v), "head_dim_qk");
  if (p.heads_q % p.heads_kv != 0) {
    refuse_field("heads_kv", std::to_string(p.heads_kv) + " for " + std::to_string(p.heads_q) + " heads",
                 "a divisor of heads_q");
  }
  check_grain(p.quantization);
  if (p.quantization.smooth && p.heads_kv != p.heads_q) {
    refuse_field("quantization.smooth", "heads that share a key head", "as many key heads as heads: K is smoothed");
  }
}

std::string_view own_field(const Problem& p) {
  if (p.quantization.hadamard) return "quantization.hadamard";
  if (p.quantization.given) return "quantization.given";
  return p.quantization.counts ? "quantization.counts" : "";
}

void tensors(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::x, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_rows(Slot::x_quantized, Access::write, p.o_type, p.heads_q, p.head_dim_qk);
  query_descales(w, p, Slot::x_descale, p.quantization.given ? Access::read : Access::write, p.heads_q);
  if (p.quantization.smooth) w.require(Slot::x_mean, Access::write, DType::fp32, {p.batch, p.heads_q, p.head_dim_qk});
  if (p.quantization.counts) w.require(Slot::saturated, Access::write, DType::int64, {1});
  if (p.quantization.hadamard) w.seeds();
  w.query_lengths();
}

void check_values(const Problem& p, const Bindings& bindings) {
  check_query_lengths(p, bindings);
  if (p.quantization.given) check_query_descales(p, bindings, Slot::x_descale);
}

}  // namespace

const OperationRules kQuantize = {
    .operation = Operation::quantize,
    .name = "quantize",
    .parse = parse,
    .print = print,
    .check = check,
    .own_field = own_field,
    .tensors = tensors,
    .check_values = check_values,
};

}  // namespace tessera::detail
