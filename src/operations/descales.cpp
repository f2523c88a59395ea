// SPDX-License-Identifier: Apache-2.0
#include "operations/descales.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "problem/grammar.h"
#include "problem/shared_checks.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

constexpr Word<Grain> kGrains[] = {{"head", Grain::head}, {"block", Grain::block}, {"token", Grain::token}};

void check_descale(Slot slot, const Tensor& descales, std::int64_t first, std::int64_t head, std::int64_t last) {
  const std::int64_t at = first * descales.strides[0] + head * descales.strides[1] + last * descales.strides[2];
  const float value = descales.as<const float>()[at];
  if (value > 0.0F && std::isfinite(value)) return;
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)),
              "[" + std::to_string(first) + ", " + std::to_string(head) + ", " + std::to_string(last) +
                  "] = " + std::to_string(value),
              "a positive, finite number");
}

void check_head_descales(Slot slot, const Tensor& descales) {
  for (std::int64_t b = 0; b < descales.shape[0]; ++b) {
    for (std::int64_t h = 0; h < descales.shape[1]; ++h) {
      const float value = descales.as<const float>()[b * descales.strides[0] + h * descales.strides[1]];
      if (value > 0.0F && std::isfinite(value)) continue;
      throw Error(ErrorCode::out_of_range, std::string(to_string(slot)),
                  "[" + std::to_string(b) + ", " + std::to_string(h) + "] = " + std::to_string(value),
                  "a positive, finite number");
    }
  }
}

/// (heads, tokens) as (1, heads, tokens).
Tensor with_batch(const Tensor& descales) {
  if (descales.rank == 3) return descales;
  Tensor whole = descales;
  whole.rank = 3;
  whole.shape = {1, descales.shape[0], descales.shape[1]};
  whole.strides = {0, descales.strides[0], descales.strides[1]};
  return whole;
}

/// Checks the descales of a sequence's first `length` tokens. In a packed tensor these begin at token `begin`.
void check_sequence(const Problem& p, Slot slot, const Tensor& descales, std::int64_t b, std::int64_t begin,
                    std::int64_t length, bool packed) {
  const bool by_token = p.quantization.grain == Grain::token;
  const std::int64_t count = by_token ? length : ceil_div(length, p.quantization.block);
  const bool one_row = by_token && packed;
  for (std::int64_t h = 0; h < descales.shape[1]; ++h) {
    for (std::int64_t i = 0; i < count; ++i) check_descale(slot, descales, one_row ? 0 : b, h, one_row ? begin + i : i);
  }
}

void check_page_descales(const Problem& p, Slot slot, const Tensor& descales, const std::int32_t* pages,
                         std::int64_t length) {
  const std::int64_t step = p.quantization.grain == Grain::token ? 1 : p.quantization.block;
  for (std::int64_t h = 0; h < descales.shape[1]; ++h) {
    for (std::int64_t i = 0; i < length; i += step) {
      check_descale(slot, descales, pages[i / p.kv.page_size], h, i % p.kv.page_size / step);
    }
  }
}

}  // namespace

void read_descales(const LineReader& line, Problem& p) {
  Quantization& q = p.quantization;
  q.smooth = line.flag("smooth");
  const auto text = line.value("descale");
  if (!text) return;
  const auto fields = split(*text, ':');
  q.grain = line.to_word("descale", fields[0], kGrains);
  if (fields.size() != (q.grain == Grain::block ? 2 : 1)) line.reject("descale", *text, "head, block:N or token");
  if (q.grain == Grain::block) q.block = line.to_integer("descale", fields[1]);
}

void write_descales(LineWriter& line, const Problem& p) {
  const Quantization& q = p.quantization;
  if (q.grain != Grain::head) {
    std::string text(word_of(kGrains, q.grain));
    if (q.grain == Grain::block) text.append(":").append(std::to_string(q.block));
    line.word("descale", text);
  }
  line.flag("smooth", q.smooth);
}

void check_grain(const Quantization& q) {
  if (q.grain == Grain::block) {
    check_size("quantization.block", q.block, 1);
  } else if (q.block != Quantization{}.block) {
    refuse_field("quantization.block", std::to_string(q.block), "Grain::block, or no block");
  }
}

SlotRule& query_descales(RuleWriter& w, const Problem& p, Slot slot, RuleWriter::Access access, std::int64_t heads) {
  switch (p.quantization.grain) {
    case Grain::head:
      return w.require(slot, access, DType::fp32, {p.batch, p.heads_kv});
    case Grain::block:
      return w.require(slot, access, DType::fp32, {p.batch, heads, ceil_div(p.seqlen_q, p.quantization.block)});
    case Grain::token:
      break;
  }
  if (p.q_layout == Layout::varlen) return w.require(slot, access, DType::fp32, {heads, p.total_q});
  return w.require(slot, access, DType::fp32, {p.batch, heads, p.seqlen_q});
}

SlotRule& key_descales(RuleWriter& w, const Problem& p, Slot slot) {
  const auto require = [&](std::initializer_list<std::int64_t> shape) -> SlotRule& {
    return w.require(slot, RuleWriter::Access::read, DType::fp32, shape);
  };
  const Quantization& q = p.quantization;
  if (q.grain == Grain::head) return require({p.batch, p.heads_kv});
  const std::int64_t step = q.grain == Grain::token ? 1 : q.block;
  if (is_paged(p.kv.layout)) return require({p.kv.pages, p.heads_kv, p.kv.page_size / step});
  if (q.grain == Grain::token && p.kv.layout == KvLayout::varlen) return require({p.heads_kv, p.kv.total});
  return require({p.batch, p.heads_kv, ceil_div(p.kv.seqlen, step)});
}

void check_query_descales(const Problem& p, const Bindings& bindings, Slot slot) {
  if (p.quantization.grain == Grain::head) return check_head_descales(slot, bindings[slot]);
  const Tensor descales = with_batch(bindings[slot]);
  const Tensor& cu = bindings[Slot::cu_seqlens_q];
  for (std::int64_t b = 0; b < p.batch; ++b) {
    check_sequence(p, slot, descales, b, cu ? int32_at(cu, b) : 0,
                   length_of(cu, bindings[Slot::seqused_q], p.seqlen_q, b), static_cast<bool>(cu));
  }
}

void check_key_descales(const Problem& p, const Bindings& bindings, Slot slot) {
  if (p.quantization.grain == Grain::head) return check_head_descales(slot, bindings[slot]);
  const Tensor descales = with_batch(bindings[slot]);
  const Tensor& cu = bindings[Slot::cu_seqlens_k];
  const Tensor& used = bindings[Slot::seqused_k];
  for (std::int64_t b = 0; b < p.batch; ++b) {
    if (p.kv.layout == KvLayout::paged_table) {
      const Tensor& table = bindings[Slot::page_table];
      check_page_descales(p, slot, descales, table.as<const std::int32_t>() + b * table.strides[0], int32_at(used, b));
    } else if (p.kv.layout == KvLayout::paged_csr) {
      const std::int64_t first = int32_at(bindings[Slot::page_indptr], b);
      const std::int64_t pages = int32_at(bindings[Slot::page_indptr], b + 1) - first;
      const std::int64_t length =
          pages == 0 ? 0 : (pages - 1) * p.kv.page_size + int32_at(bindings[Slot::last_page_len], b);
      check_page_descales(p, slot, descales, bindings[Slot::page_indices].as<const std::int32_t>() + first, length);
    } else {
      check_sequence(p, slot, descales, b, cu ? int32_at(cu, b) : 0, length_of(cu, used, p.kv.seqlen, b),
                     static_cast<bool>(cu));
    }
  }
}

}  // namespace tessera::detail
