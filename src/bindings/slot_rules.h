// SPDX-License-Identifier: Apache-2.0
// What each slot of the bindings must hold for a problem: the table behind validate().
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/executor.h"
#include "tessera/problem.h"

namespace tessera::detail {

enum class Presence : std::uint8_t { unused, optional, required };

struct SlotRule {
  Presence presence = Presence::unused;
  bool read = false;
  bool written = false;  // with `read`: updated in place
  DType dtype = DType::fp32;
  bool or_fp32 = false;        // fp32 is accepted, too
  bool or_int64 = false;       // int64 is accepted, too
  bool leading_batch = false;  // the first dimension may be left out
  int rank = 0;
  std::array<std::int64_t, Tensor::kMaxRank> shape{};
  std::uint8_t at_least = 0;  // bit i: dimension i may be larger
};

struct SlotRules {
  std::array<SlotRule, static_cast<std::size_t>(Slot::count_)> rules{};
  SlotRule& operator[](Slot slot) noexcept { return rules[static_cast<std::size_t>(slot)]; }
  const SlotRule& operator[](Slot slot) const noexcept { return rules[static_cast<std::size_t>(slot)]; }
};

/// Slots of the first or second source of keys.
struct SourceSlots {
  Slot k, v, dk, dv, cu_seqlens, seqused, page_table, page_indptr, page_indices, last_page_len, offset;
};
const SourceSlots& source_slots(bool second) noexcept;

/// Slots of the forward's or the backward's tile list.
struct ListSlots {
  Slot counts, indices, bits, full_counts, full_indices, full_bits;
};
const ListSlots& list_slots(bool backward) noexcept;

/// The rules of the problem's operation (src/operations). Allocates nothing.
SlotRules slot_rules(const Problem& problem) noexcept;
/// "bf16 (2, 128, 8, 64)", for errors.
std::string describe(const SlotRule& rule);
/// Which words of the problem line give the slot a use, for errors.
std::string_view slot_use(Slot slot) noexcept;
/// Whether the slot's tensor has rows that kernels load and store 16 bytes at a time.
bool has_rows(Slot slot) noexcept;

}  // namespace tessera::detail
