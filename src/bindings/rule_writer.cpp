// SPDX-License-Identifier: Apache-2.0
#include "bindings/rule_writer.h"

#include <algorithm>

#include "base/checked.h"
#include "problem/registered_callables.h"

namespace tessera::detail {

SlotRule& RuleWriter::set(Slot slot, Presence presence, Access access, DType dtype,
                          std::initializer_list<std::int64_t> shape) {
  SlotRule& rule = rules_[slot];
  rule.presence = presence;
  rule.read = access != Access::write;
  rule.written = access != Access::read;
  rule.dtype = dtype;
  rule.rank = static_cast<int>(shape.size());
  std::size_t i = 0;
  for (const std::int64_t size : shape) rule.shape[i++] = size;
  return rule;
}

SlotRule& RuleWriter::query_rows(Slot slot, Access access, DType dtype, std::int64_t heads, std::int64_t dim) {
  if (p_.q_layout == Layout::varlen) return require(slot, access, dtype, {p_.total_q, heads, dim});
  return require(slot, access, dtype, {p_.batch, p_.seqlen_q, heads, dim});
}

SlotRule& RuleWriter::lse_rows(Slot slot, Access access) {
  if (p_.q_layout == Layout::varlen) return require(slot, access, DType::fp32, {p_.heads_q, p_.total_q});
  return require(slot, access, DType::fp32, {p_.batch, p_.heads_q, p_.seqlen_q});
}

SlotRule& RuleWriter::key_rows(Slot slot, Access access, const KvSource& kv, DType dtype, std::int64_t dim) {
  switch (kv.layout) {
    case KvLayout::dense:
      return require(slot, access, dtype, {p_.batch, kv.seqlen, p_.heads_kv, dim});
    case KvLayout::varlen:
      return require(slot, access, dtype, {kv.total, p_.heads_kv, dim});
    case KvLayout::paged_table:
    case KvLayout::paged_csr:
      break;
  }
  return require(slot, access, dtype, {kv.pages, kv.page_size, p_.heads_kv, dim});
}

void RuleWriter::query_lengths() {
  if (p_.q_layout == Layout::varlen) require(Slot::cu_seqlens_q, Access::read, DType::int32, {p_.batch + 1});
  if (p_.seqused_q) require(Slot::seqused_q, Access::read, DType::int32, {p_.batch});
}

void RuleWriter::key_lengths(const KvSource& kv, const SourceSlots& slots, Presence last) {
  if (kv.layout == KvLayout::varlen) require(slots.cu_seqlens, Access::read, DType::int32, {p_.batch + 1});
  if (kv.seqused) require(slots.seqused, Access::read, DType::int32, {p_.batch});
  if (kv.layout == KvLayout::paged_table) {
    const std::int64_t columns = ceil_div(kv.seqlen, kv.page_size);
    require(slots.page_table, Access::read, DType::int32, {p_.batch, columns}).at_least = 2U;
  }
  if (kv.layout == KvLayout::paged_csr) {
    require(slots.page_indptr, Access::read, DType::int32, {p_.batch + 1});
    require(slots.page_indices, Access::read, DType::int32, {0}).at_least = 1U;
    set(slots.last_page_len, last, Access::read, DType::int32, {p_.batch});
  }
}

void RuleWriter::seeds() {
  allow(Slot::dropout_seed, DType::uint64, {1});
  allow(Slot::dropout_offset, DType::uint64, {1});
}

void RuleWriter::extras() {
  const RegisteredCallables registered(p_);
  const int count = std::min(registered.score_extras() + registered.mask_extras(), kMaxExtras);
  for (int i = 0; i < count; ++i) {
    const ExtraTensor& extra = registered.extra(i);
    SlotRule& rule = require(extra_slot(i), Access::read, extra.dtype, {});
    rule.rank = extra.rank;
    for (int d = 0; d < extra.rank; ++d) rule.shape[static_cast<std::size_t>(d)] = 1;
    rule.at_least = static_cast<std::uint8_t>((1U << extra.rank) - 1U);
  }
}

}  // namespace tessera::detail
