// SPDX-License-Identifier: Apache-2.0
#include "shared/metadata.h"
#include "tessera/executor.h"

namespace tessera {
namespace {

// In the order of enum Slot.
constexpr std::string_view kSlotNames[] = {
    "q",
    "k",
    "v",
    "o",
    "lse",
    "dout",
    "dlse",
    "dq",
    "dk",
    "dv",
    "sink",
    "dsink",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "page_table",
    "page_indptr",
    "page_indices",
    "last_page_len",
    "k2",
    "v2",
    "dk2",
    "dv2",
    "cu_seqlens_k2",
    "seqused_k2",
    "page_table2",
    "page_indptr2",
    "page_indices2",
    "last_page_len2",
    "q_offset",
    "k_offset",
    "k_offset2",
    "tile_counts",
    "tile_indices",
    "full_counts",
    "full_indices",
    "tile_bits",
    "full_bits",
    "bwd_tile_counts",
    "bwd_tile_indices",
    "bwd_full_counts",
    "bwd_full_indices",
    "bwd_tile_bits",
    "bwd_full_bits",
    "next_counts",
    "next_indices",
    "next_bits",
    "tile_mass",
    "prior_lse",
    "dropout_seed",
    "dropout_offset",
    "o_parts",
    "lse_parts",
    "k_new",
    "v_new",
    "rotary_cos",
    "rotary_sin",
    "q_rotated",
    "state",
    "state_slots",
    "dest_slots",
    "decay_slopes",
    "ring_k",
    "ring_v",
    "ring_cursor",
    "dstate_final",
    "dstate_initial",
    "extra0",
    "extra1",
    "extra2",
    "extra3",
    "status",
};
static_assert(std::size(kSlotNames) == static_cast<std::size_t>(Slot::count_));
static_assert(kSlotNames[static_cast<std::size_t>(Slot::k2)] == "k2");
static_assert(kSlotNames[static_cast<std::size_t>(Slot::q_offset)] == "q_offset");
static_assert(kSlotNames[static_cast<std::size_t>(Slot::tile_mass)] == "tile_mass");
static_assert(kSlotNames[static_cast<std::size_t>(Slot::status)] == "status");

}  // namespace

std::string_view to_string(Slot slot) noexcept {
  const auto index = static_cast<std::size_t>(slot);
  return index < std::size(kSlotNames) ? kSlotNames[index] : "unknown slot";
}

std::optional<Slot> parse_slot(std::string_view name) noexcept {
  for (std::size_t i = 0; i < std::size(kSlotNames); ++i) {
    if (kSlotNames[i] == name) return static_cast<Slot>(i);
  }
  return std::nullopt;
}

std::optional<Violation> violation_of(std::int32_t status) noexcept {
  const int slot = (status & ((1 << cuda::kStatusSlotBits) - 1)) - 1;
  if (status <= 0 || slot < 0 || slot >= static_cast<int>(Slot::count_)) return std::nullopt;
  return Violation{static_cast<Slot>(slot), status >> cuda::kStatusSlotBits};
}

}  // namespace tessera
