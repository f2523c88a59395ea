// SPDX-License-Identifier: Apache-2.0
// The words of slot rules in errors.
#include "core/slot_rules.h"

namespace tessera::detail {

std::string describe(const SlotRule& rule) {
  std::string text(to_string(rule.dtype));
  if (rule.or_fp32 && rule.dtype != DType::fp32) text += " or fp32";
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

std::string_view slot_use(Slot slot) noexcept {
  switch (slot) {
    case Slot::lse:
      return "lse or pass=backward";
    case Slot::dout:
    case Slot::dq:
    case Slot::dk:
    case Slot::dv:
      return "pass=backward";
    case Slot::dlse:
      return "dlse with pass=backward";
    case Slot::sink:
      return "sink";
    case Slot::dsink:
      return "sink with pass=backward";
    case Slot::alibi_slopes:
      return "alibi";
    case Slot::cu_seqlens_q:
      return "layout=varlen";
    case Slot::cu_seqlens_k:
      return "kv=varlen";
    case Slot::seqused_q:
      return "seqused_q";
    case Slot::seqused_k:
      return "seqused_k or kv=table";
    case Slot::page_table:
      return "kv=table";
    case Slot::page_indptr:
    case Slot::page_indices:
    case Slot::last_page_len:
      return "kv=csr";
    case Slot::k2:
    case Slot::v2:
    case Slot::k_offset2:
      return "kv2=";
    case Slot::dk2:
    case Slot::dv2:
      return "kv2= with pass=backward";
    case Slot::cu_seqlens_k2:
      return "kv2=varlen";
    case Slot::seqused_k2:
      return "seqused_k2 or kv2=table";
    case Slot::page_table2:
      return "kv2=table";
    case Slot::page_indptr2:
    case Slot::page_indices2:
    case Slot::last_page_len2:
      return "kv2=csr";
    case Slot::tile_counts:
    case Slot::tile_indices:
      return "list=indices or list=transposed";
    case Slot::full_counts:
    case Slot::full_indices:
      return "list=indices:…:full or list=transposed:…:full";
    case Slot::tile_bits:
      return "list=bitmask";
    case Slot::full_bits:
      return "list=bitmask:…:full";
    case Slot::bwd_tile_counts:
    case Slot::bwd_tile_indices:
      return "bwd_list=indices or bwd_list=transposed, with pass=backward";
    case Slot::bwd_full_counts:
    case Slot::bwd_full_indices:
      return "bwd_list=indices:…:full or bwd_list=transposed:…:full, with pass=backward";
    case Slot::bwd_tile_bits:
      return "bwd_list=bitmask with pass=backward";
    case Slot::bwd_full_bits:
      return "bwd_list=bitmask:…:full with pass=backward";
    case Slot::next_counts:
    case Slot::next_indices:
      return "next=indices";
    case Slot::next_bits:
      return "next=bitmask";
    case Slot::tile_mass:
      return "mass=mean or mass=rms";
    case Slot::prior_lse:
      return "mass_lse=prior";
    case Slot::dropout_seed:
    case Slot::dropout_offset:
      return "dropout=";
    case Slot::o_parts:
    case Slot::lse_parts:
      return "the operation combine";
    case Slot::k_new:
    case Slot::v_new:
    case Slot::q_rotated:
      return "the operation kv_append";
    case Slot::rotary_cos:
    case Slot::rotary_sin:
      return "rotary= of kv_append";
    case Slot::status:
      return "metadata=report";
    case Slot::q:
    case Slot::k:
    case Slot::v:
    case Slot::q_offset:
    case Slot::k_offset:
      return "the operation attention";
    case Slot::o:
      return "the operations attention and combine";
    case Slot::count_:
      break;
  }
  return "no problem";
}

}  // namespace tessera::detail
