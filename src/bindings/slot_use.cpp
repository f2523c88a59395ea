// SPDX-License-Identifier: Apache-2.0
// The words of slot rules in errors.
#include <iterator>

#include "bindings/slot_rules.h"

namespace tessera::detail {
namespace {

struct Use {
  Slot slot;
  std::string_view words;
};

constexpr Use kUses[] = {
    {Slot::lse, "lse or pass=backward"},
    {Slot::dout, "pass=backward"},
    {Slot::dq, "pass=backward"},
    {Slot::dk, "pass=backward"},
    {Slot::dv, "pass=backward"},
    {Slot::dlse, "dlse with pass=backward"},
    {Slot::sink, "sink"},
    {Slot::dsink, "sink with pass=backward"},
    {Slot::alibi_slopes, "alibi"},
    {Slot::cu_seqlens_q, "layout=varlen"},
    {Slot::cu_seqlens_k, "kv=varlen"},
    {Slot::seqused_q, "seqused_q"},
    {Slot::seqused_k, "seqused_k or kv=table"},
    {Slot::page_table, "kv=table"},
    {Slot::page_indptr, "kv=csr"},
    {Slot::page_indices, "kv=csr"},
    {Slot::last_page_len, "kv=csr"},
    {Slot::k2, "kv2="},
    {Slot::v2, "kv2="},
    {Slot::k_offset2, "kv2="},
    {Slot::dk2, "kv2= with pass=backward"},
    {Slot::dv2, "kv2= with pass=backward"},
    {Slot::cu_seqlens_k2, "kv2=varlen"},
    {Slot::seqused_k2, "seqused_k2 or kv2=table"},
    {Slot::page_table2, "kv2=table"},
    {Slot::page_indptr2, "kv2=csr"},
    {Slot::page_indices2, "kv2=csr"},
    {Slot::last_page_len2, "kv2=csr"},
    {Slot::tile_counts, "list=indices or list=transposed"},
    {Slot::tile_indices, "list=indices or list=transposed"},
    {Slot::full_counts, "list=indices:…:full or list=transposed:…:full"},
    {Slot::full_indices, "list=indices:…:full or list=transposed:…:full"},
    {Slot::tile_bits, "list=bitmask"},
    {Slot::full_bits, "list=bitmask:…:full"},
    {Slot::bwd_tile_counts, "bwd_list=indices or bwd_list=transposed, with pass=backward"},
    {Slot::bwd_tile_indices, "bwd_list=indices or bwd_list=transposed, with pass=backward"},
    {Slot::bwd_full_counts, "bwd_list=indices:…:full or bwd_list=transposed:…:full, with pass=backward"},
    {Slot::bwd_full_indices, "bwd_list=indices:…:full or bwd_list=transposed:…:full, with pass=backward"},
    {Slot::bwd_tile_bits, "bwd_list=bitmask with pass=backward"},
    {Slot::bwd_full_bits, "bwd_list=bitmask:…:full with pass=backward"},
    {Slot::next_counts, "next=indices"},
    {Slot::next_indices, "next=indices"},
    {Slot::next_bits, "next=bitmask"},
    {Slot::tile_mass, "mass=mean or mass=rms"},
    {Slot::prior_lse, "mass_lse=prior"},
    {Slot::dropout_seed, "dropout= or rounding=stochastic"},
    {Slot::dropout_offset, "dropout= or rounding=stochastic"},
    {Slot::o_parts, "the operation combine"},
    {Slot::lse_parts, "the operation combine"},
    {Slot::k_new, "the operation kv_append"},
    {Slot::v_new, "the operation kv_append"},
    {Slot::q_rotated, "the operation kv_append"},
    {Slot::state, "the operation linear_decode, or linear_chunk with slots="},
    {Slot::state_slots, "the operation linear_decode, or linear_chunk with slots="},
    {Slot::dest_slots, "the operation linear_decode without ring=, or a forward of linear_chunk with slots="},
    {Slot::decay_slopes, "the operations linear_decode and linear_chunk"},
    {Slot::ring_k, "ring= of linear_decode"},
    {Slot::ring_v, "ring= of linear_decode"},
    {Slot::ring_cursor, "ring= of linear_decode"},
    {Slot::dstate_final, "pass=backward of linear_chunk with slots="},
    {Slot::dstate_initial, "pass=backward of linear_chunk with slots="},
    {Slot::rotary_cos, "rotary= of kv_append"},
    {Slot::rotary_sin, "rotary= of kv_append"},
    {Slot::extra0, "a registered score or mask that has extra tensors"},
    {Slot::extra1, "a registered score or mask that has extra tensors"},
    {Slot::extra2, "a registered score or mask that has extra tensors"},
    {Slot::extra3, "a registered score or mask that has extra tensors"},
    {Slot::status, "metadata=report"},
    {Slot::q, "the operations attention, linear_decode and linear_chunk"},
    {Slot::k, "the operations attention, linear_decode and linear_chunk"},
    {Slot::v, "the operations attention, linear_decode and linear_chunk"},
    {Slot::q_offset, "the operation attention"},
    {Slot::k_offset, "the operation attention"},
    {Slot::o, "the operations attention, combine, linear_decode and a forward of linear_chunk"},
};
static_assert(std::size(kUses) == static_cast<std::size_t>(Slot::count_));

}  // namespace

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

std::string_view slot_use(Slot slot) noexcept {
  for (const Use& use : kUses) {
    if (use.slot == slot) return use.words;
  }
  return "no problem";
}

}  // namespace tessera::detail
