// SPDX-License-Identifier: Apache-2.0
#include "bindings/slot_rules.h"

#include "bindings/rule_writer.h"
#include "problem/operation.h"

namespace tessera::detail {

const SourceSlots& source_slots(bool second) noexcept {
  static constexpr SourceSlots kSlots[] = {
      {Slot::k, Slot::v, Slot::dk, Slot::dv, Slot::cu_seqlens_k, Slot::seqused_k, Slot::page_table, Slot::page_indptr,
       Slot::page_indices, Slot::last_page_len, Slot::k_offset},
      {Slot::k2, Slot::v2, Slot::dk2, Slot::dv2, Slot::cu_seqlens_k2, Slot::seqused_k2, Slot::page_table2,
       Slot::page_indptr2, Slot::page_indices2, Slot::last_page_len2, Slot::k_offset2}};
  return kSlots[second ? 1 : 0];
}

const ListSlots& list_slots(bool backward) noexcept {
  static constexpr ListSlots kSlots[] = {
      {Slot::tile_counts, Slot::tile_indices, Slot::tile_bits, Slot::full_counts, Slot::full_indices, Slot::full_bits},
      {Slot::bwd_tile_counts, Slot::bwd_tile_indices, Slot::bwd_tile_bits, Slot::bwd_full_counts,
       Slot::bwd_full_indices, Slot::bwd_full_bits}};
  return kSlots[backward ? 1 : 0];
}

SlotRules slot_rules(const Problem& problem) noexcept {
  RuleWriter writer(problem);
  rules_of(problem.operation).tensors(writer, problem);
  if (problem.metadata == Metadata::report) {
    writer.set(Slot::status, Presence::optional, RuleWriter::Access::write, DType::int32, {1});
  }
  return writer.rules();
}

std::string describe(const SlotRule& rule) {
  std::string text(to_string(rule.dtype));
  if (rule.or_fp32 && rule.dtype != DType::fp32) text += " or fp32";
  if (rule.or_int64) text += " or int64";
  text += " (";
  for (int i = 0; i < rule.rank; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(rule.shape[static_cast<std::size_t>(i)]);
    if ((rule.at_least >> i & 1U) != 0) text += "+";
  }
  text += ")";
  if (rule.leading_batch) text += ", or without the first dimension";
  return text;
}

}  // namespace tessera::detail
