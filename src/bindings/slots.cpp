// SPDX-License-Identifier: Apache-2.0
// The table of slots.
#include <algorithm>
#include <iterator>

#include "bindings/slot_rules.h"
#include "shared/metadata.h"
#include "tessera/executor.h"

namespace tessera {
namespace {

struct SlotRow {
  Slot slot;
  std::string_view name;
  std::string_view use;   // words of the problem line that give the slot a use
  bool has_rows = false;  // kernels load and store its rows 16 bytes at a time
};

// In the order of enum Slot.
constexpr SlotRow kSlots[] = {
    {Slot::q, "q", "the operations attention, linear_decode, linear_chunk, nsa_select and nsa_gate", true},
    {Slot::k, "k", "the operations attention, linear_decode, linear_chunk and nsa_pool", true},
    {Slot::v, "v", "the operations attention, linear_decode, linear_chunk and nsa_pool", true},
    {Slot::o, "o", "the operations attention, combine, linear_decode, and a forward of linear_chunk or nsa_gate", true},
    {Slot::o_residual, "o_residual", "residual", true},
    {Slot::lse, "lse", "lse or pass=backward"},
    {Slot::dout, "dout", "pass=backward", true},
    {Slot::dlse, "dlse", "dlse with pass=backward"},
    {Slot::dq, "dq", "pass=backward", true},
    {Slot::dk, "dk", "pass=backward", true},
    {Slot::dv, "dv", "pass=backward", true},
    {Slot::sink, "sink", "sink"},
    {Slot::dsink, "dsink", "sink with pass=backward"},
    {Slot::alibi_slopes, "alibi_slopes", "alibi"},
    {Slot::cu_seqlens_q, "cu_seqlens_q", "layout=varlen"},
    {Slot::cu_seqlens_k, "cu_seqlens_k", "kv=varlen"},
    {Slot::seqused_q, "seqused_q", "seqused_q"},
    {Slot::seqused_k, "seqused_k", "seqused_k or kv=table"},
    {Slot::page_table, "page_table", "kv=table"},
    {Slot::page_indptr, "page_indptr", "kv=csr"},
    {Slot::page_indices, "page_indices", "kv=csr"},
    {Slot::last_page_len, "last_page_len", "kv=csr"},
    {Slot::k2, "k2", "kv2=", true},
    {Slot::v2, "v2", "kv2=", true},
    {Slot::dk2, "dk2", "kv2= with pass=backward", true},
    {Slot::dv2, "dv2", "kv2= with pass=backward", true},
    {Slot::cu_seqlens_k2, "cu_seqlens_k2", "kv2=varlen"},
    {Slot::seqused_k2, "seqused_k2", "seqused_k2 or kv2=table"},
    {Slot::page_table2, "page_table2", "kv2=table"},
    {Slot::page_indptr2, "page_indptr2", "kv2=csr"},
    {Slot::page_indices2, "page_indices2", "kv2=csr"},
    {Slot::last_page_len2, "last_page_len2", "kv2=csr"},
    {Slot::q_offset, "q_offset", "the operations attention and nsa_select"},
    {Slot::k_offset, "k_offset", "the operation attention"},
    {Slot::k_offset2, "k_offset2", "kv2="},
    {Slot::tile_counts, "tile_counts", "list=indices or list=transposed"},
    {Slot::tile_indices, "tile_indices", "list=indices or list=transposed"},
    {Slot::full_counts, "full_counts", "list=indices:…:full or list=transposed:…:full"},
    {Slot::full_indices, "full_indices", "list=indices:…:full or list=transposed:…:full"},
    {Slot::tile_bits, "tile_bits", "list=bitmask"},
    {Slot::full_bits, "full_bits", "list=bitmask:…:full"},
    {Slot::bwd_tile_counts, "bwd_tile_counts", "bwd_list=indices or bwd_list=transposed, with pass=backward"},
    {Slot::bwd_tile_indices, "bwd_tile_indices", "bwd_list=indices or bwd_list=transposed, with pass=backward"},
    {Slot::bwd_full_counts, "bwd_full_counts",
     "bwd_list=indices:…:full or bwd_list=transposed:…:full, with pass=backward"},
    {Slot::bwd_full_indices, "bwd_full_indices",
     "bwd_list=indices:…:full or bwd_list=transposed:…:full, with pass=backward"},
    {Slot::bwd_tile_bits, "bwd_tile_bits", "bwd_list=bitmask with pass=backward"},
    {Slot::bwd_full_bits, "bwd_full_bits", "bwd_list=bitmask:…:full with pass=backward"},
    {Slot::next_counts, "next_counts", "next=indices"},
    {Slot::next_indices, "next_indices", "next=indices"},
    {Slot::next_bits, "next_bits", "next=bitmask"},
    {Slot::tile_mass, "tile_mass", "mass=mean or mass=rms"},
    {Slot::prior_lse, "prior_lse", "mass_lse=prior"},
    {Slot::skip_memory, "skip_memory", "skip=mass"},
    {Slot::skip_lse, "skip_lse", "skip=mass"},
    {Slot::skip_threshold, "skip_threshold", "skip="},
    {Slot::skip_step, "skip_step", "skip=threshold"},
    {Slot::must_do_bits, "must_do_bits", "skip="},
    {Slot::must_skip_bits, "must_skip_bits", "skip="},
    {Slot::dropout_seed, "dropout_seed", "dropout=, rounding=stochastic or hadamard"},
    {Slot::dropout_offset, "dropout_offset", "dropout=, rounding=stochastic or hadamard"},
    {Slot::o_parts, "o_parts", "the operations combine and nsa_gate", true},
    {Slot::lse_parts, "lse_parts", "the operation combine"},
    {Slot::k_new, "k_new", "the operation kv_append", true},
    {Slot::v_new, "v_new", "the operation kv_append", true},
    {Slot::rotary_cos, "rotary_cos", "rotary= of kv_append"},
    {Slot::rotary_sin, "rotary_sin", "rotary= of kv_append"},
    {Slot::q_rotated, "q_rotated", "the operation kv_append", true},
    {Slot::state, "state", "the operation linear_decode, or linear_chunk with slots=", true},
    {Slot::state_slots, "state_slots", "the operation linear_decode, or linear_chunk with slots="},
    {Slot::dest_slots, "dest_slots",
     "the operation linear_decode without ring=, or a forward of linear_chunk with slots="},
    {Slot::decay_slopes, "decay_slopes", "the operations linear_decode and linear_chunk"},
    {Slot::ring_k, "ring_k", "ring= of linear_decode", true},
    {Slot::ring_v, "ring_v", "ring= of linear_decode", true},
    {Slot::ring_cursor, "ring_cursor", "ring= of linear_decode"},
    {Slot::dstate_final, "dstate_final", "pass=backward of linear_chunk with slots=", true},
    {Slot::dstate_initial, "dstate_initial", "pass=backward of linear_chunk with slots=", true},
    {Slot::k_pooled, "k_pooled", "the operations nsa_pool and nsa_select", true},
    {Slot::v_pooled, "v_pooled", "the operation nsa_pool", true},
    {Slot::dk_pooled, "dk_pooled", "pass=backward of nsa_pool", true},
    {Slot::dv_pooled, "dv_pooled", "pass=backward of nsa_pool", true},
    {Slot::cu_blocks, "cu_blocks", "the operation nsa_pool with kv=varlen"},
    {Slot::k_projection, "k_projection", "project of nsa_pool", true},
    {Slot::v_projection, "v_projection", "project of nsa_pool", true},
    {Slot::dk_projection, "dk_projection", "project of nsa_pool with pass=backward", true},
    {Slot::dv_projection, "dv_projection", "project of nsa_pool with pass=backward", true},
    {Slot::selected_counts, "selected_counts", "the operation nsa_select"},
    {Slot::selected_indices, "selected_indices", "the operation nsa_select"},
    {Slot::compressed_counts, "compressed_counts", "compressed_top of nsa_select"},
    {Slot::compressed_indices, "compressed_indices", "compressed_top of nsa_select"},
    {Slot::gates, "gates", "gate=given of nsa_gate"},
    {Slot::dgates, "dgates", "gate=given of nsa_gate with pass=backward"},
    {Slot::gate_weight, "gate_weight", "gate=sigmoid of nsa_gate", true},
    {Slot::dgate_weight, "dgate_weight", "gate=sigmoid of nsa_gate with pass=backward", true},
    {Slot::do_parts, "do_parts", "pass=backward of nsa_gate", true},
    {Slot::q_descale, "q_descale", "q of 8 bits"},
    {Slot::k_descale, "k_descale", "k of 8 bits"},
    {Slot::v_descale, "v_descale", "v of 8 bits"},
    {Slot::k_mean, "k_mean", "smooth"},
    {Slot::x, "x", "the operation quantize", true},
    {Slot::x_quantized, "x_quantized", "the operation quantize", true},
    {Slot::x_descale, "x_descale", "the operation quantize"},
    {Slot::x_mean, "x_mean", "smooth of quantize"},
    {Slot::saturated, "saturated", "saturated of quantize"},
    {Slot::extra0, "extra0", "a registered score or mask that has extra tensors"},
    {Slot::extra1, "extra1", "a registered score or mask that has extra tensors"},
    {Slot::extra2, "extra2", "a registered score or mask that has extra tensors"},
    {Slot::extra3, "extra3", "a registered score or mask that has extra tensors"},
    {Slot::status, "status", "metadata=report"},
};

constexpr bool are_in_order() {
  for (std::size_t i = 0; i < std::size(kSlots); ++i) {
    if (kSlots[i].slot != static_cast<Slot>(i)) return false;
  }
  return std::size(kSlots) == static_cast<std::size_t>(Slot::count_);
}
static_assert(are_in_order());

const SlotRow* row_of(Slot slot) noexcept {
  const auto index = static_cast<std::size_t>(slot);
  return index < std::size(kSlots) ? &kSlots[index] : nullptr;
}

}  // namespace

std::string_view to_string(Slot slot) noexcept {
  const SlotRow* row = row_of(slot);
  return row != nullptr ? row->name : "unknown slot";
}

std::optional<Slot> parse_slot(std::string_view name) noexcept {
  for (const SlotRow& row : kSlots) {
    if (row.name == name) return row.slot;
  }
  return std::nullopt;
}

std::optional<Violation> violation_of(std::int32_t status) noexcept {
  const int slot = (status & ((1 << cuda::kStatusSlotBits) - 1)) - 1;
  if (status <= 0 || slot < 0 || slot >= static_cast<int>(Slot::count_)) return std::nullopt;
  return Violation{static_cast<Slot>(slot), status >> cuda::kStatusSlotBits};
}

namespace detail {

std::string_view slot_use(Slot slot) noexcept {
  const SlotRow* row = row_of(slot);
  return row != nullptr ? row->use : "no problem";
}

bool has_rows(Slot slot) noexcept {
  const SlotRow* row = row_of(slot);
  return row != nullptr && row->has_rows;
}

}  // namespace detail
}  // namespace tessera
