// SPDX-License-Identifier: Apache-2.0
// A problem's text form and rules: what all operations share, and then the operation's own.
#include "tessera/problem.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "base/element.h"
#include "problem/line_reader.h"
#include "problem/line_writer.h"
#include "problem/operation.h"
#include "problem/shared_checks.h"

namespace tessera {
namespace {

using namespace detail;

void check_types(const Problem& p) {
  const struct {
    std::string_view name;
    DType type;
  } inputs[] = {{"q_type", p.q_type}, {"k_type", p.k_type}, {"v_type", p.v_type}};
  for (const auto& input : inputs) {
    if (!is_operand(input.type)) refuse_field(input.name, std::string(to_string(input.type)), operand_types());
  }
  const bool quantizes = p.operation == Operation::quantize;
  if (quantizes ? !is_quantised(p.o_type) : !is_result(p.o_type)) {
    refuse_field("o_type", std::string(to_string(p.o_type)), quantizes ? "e4m3, e5m2 or int8" : result_types());
  }
}

/// Head dims of any operation; some operations also require multiples of 8.
void check_row_length(std::string_view name, std::int64_t dim) {
  if (dim < 1 || dim > 512) refuse_field(name, std::to_string(dim), "1 to 512");
}

void check_shared(const Problem& p) {
  check_size("batch", p.batch, 0);
  check_size("seqlen_q", p.seqlen_q, 0);
  check_size("heads_q", p.heads_q, 1);
  check_size("heads_kv", p.heads_kv, 1);
  check_row_length("head_dim_qk", p.head_dim_qk);
  check_row_length("head_dim_v", p.head_dim_v);
  check_size("total_q", p.total_q, 0);
  if (p.q_layout == Layout::dense && p.total_q != 0) {
    refuse_field("total_q", std::to_string(p.total_q), "0 for the dense layout");
  }
  check_types(p);
  const std::int64_t dim = std::max(p.head_dim_qk, p.head_dim_v);
  check_bytes("seqlen_q", {p.batch, p.seqlen_q, p.heads_q, dim});
  check_bytes("total_q", {p.total_q, p.heads_q, dim});
}

/// Throws if a field is set that only other operations have.
void check_no_others_fields(const Problem& p, const OperationRules& own) {
  for (const OperationRules* other : operations()) {
    if (other->own_field == nullptr || other->own_field == own.own_field) continue;
    const std::string_view field = other->own_field(p);
    if (field.empty()) continue;
    std::string want;
    for (const OperationRules* row : operations()) {
      if (row->own_field == other->own_field) want.append(want.empty() ? "" : " or ").append(row->name);
    }
    refuse_field(field, std::string(own.name), want + "; this field has no meaning here");
  }
}

/// Throws if `quantization` is set for another operation than attention and quantize.
void check_no_descales(const Problem& p) {
  if (p.operation == Operation::attention || p.operation == Operation::quantize) return;
  if (p.quantization == Quantization{}) return;
  refuse_field("quantization", std::string(name_of(p.operation)),
               "attention or quantize; this field has no meaning here");
}

}  // namespace

Problem Problem::parse(std::string_view text) {
  const LineReader line(text);
  const OperationRules* rules = operation_named(line.operation());
  if (rules == nullptr) line.reject("operation", line.operation(), operation_names());
  Problem p;
  p.operation = rules->operation;
  rules->parse(line, p);
  line.check_all_used();
  p.check();
  return p;
}

std::string Problem::to_string() const {
  const OperationRules& rules = rules_of(operation);
  LineWriter line(rules.name);
  rules.print(line, *this);
  return line.take();
}

void Problem::check() const {
  const OperationRules& rules = rules_of(operation);
  check_shared(*this);
  check_no_others_fields(*this, rules);
  check_no_descales(*this);
  rules.check(*this);
}

float Problem::softmax_scale() const noexcept {
  return scale ? *scale : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim_qk)));
}

std::int64_t Problem::query_blocks() const noexcept { return ceil_div(seqlen_q, block_q); }

std::int64_t Problem::key_blocks_first() const noexcept { return ceil_div(kv.seqlen, block_kv); }

std::int64_t Problem::key_blocks() const noexcept {
  return key_blocks_first() + (kv2 ? ceil_div(kv2->seqlen, block_kv) : 0);
}

std::int64_t Problem::list_heads(const TileList& of) const noexcept {
  switch (of.heads) {
    case TileList::Heads::one:
      return 1;
    case TileList::Heads::kv:
      return heads_kv;
    case TileList::Heads::q:
      break;
  }
  return heads_q;
}

}  // namespace tessera
