// SPDX-License-Identifier: Apache-2.0
// Checks tile lists: every entry is in range, sorted and unique, and the partial and the full list are disjoint.
#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

struct Row {
  std::int64_t batch, head, block;
};

std::int64_t offset_of(const Tensor& tensor, const Row& row) noexcept {
  return row.batch * tensor.strides[0] + row.head * tensor.strides[1] + row.block * tensor.strides[2];
}

std::string place(const Row& row, std::string_view entry) {
  std::string text =
      "(" + std::to_string(row.batch) + ", " + std::to_string(row.head) + ", " + std::to_string(row.block);
  if (!entry.empty()) text.append(", ").append(entry);
  return text + ")";
}

[[noreturn]] void refuse(Slot slot, const Row& row, std::string_view entry, std::string got, std::string want) {
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)), place(row, entry) + " = " + std::move(got),
              std::move(want));
}

/// One row of an index list: sorted unique entries below a limit.
struct Entries {
  const std::int32_t* data = nullptr;
  std::int64_t count = 0;
};

Entries check_entries(Slot counts_slot, Slot indices_slot, const Bindings& bindings, const Row& row,
                      std::int64_t limit) {
  const Tensor& counts = bindings[counts_slot];
  const Tensor& indices = bindings[indices_slot];
  const std::int64_t count = counts.as<const std::int32_t>()[offset_of(counts, row)];
  const std::int64_t capacity = indices.shape[3];
  if (count < 0 || count > capacity) {
    refuse(counts_slot, row, "", std::to_string(count), "0 to the list's capacity of " + std::to_string(capacity));
  }
  if (count == 0) return {};
  const std::int32_t* entries = indices.as<const std::int32_t>() + offset_of(indices, row);
  for (std::int64_t i = 0; i < count; ++i) {
    const bool sorted = i == 0 || entries[i] > entries[i - 1];
    if (entries[i] >= 0 && entries[i] < limit && sorted) continue;
    refuse(indices_slot, row, std::to_string(i), std::to_string(entries[i]),
           sorted ? "a block from 0 to below " + std::to_string(limit)
                  : "more than " + std::to_string(entries[i - 1]) + ", entries are sorted and unique");
  }
  return {entries, count};
}

void check_disjoint(Slot full_slot, const Row& row, Entries partial, Entries full) {
  std::int64_t i = 0;
  for (std::int64_t j = 0; j < full.count; ++j) {
    while (i < partial.count && partial.data[i] < full.data[j]) ++i;
    if (i < partial.count && partial.data[i] == full.data[j]) {
      refuse(full_slot, row, std::to_string(j), std::to_string(full.data[j]), "a block that the partial list lacks");
    }
  }
}

template <class Visit>
void for_each_row(const Tensor& tensor, Visit visit) {
  for (std::int64_t b = 0; b < tensor.shape[0]; ++b) {
    for (std::int64_t h = 0; h < tensor.shape[1]; ++h) {
      for (std::int64_t block = 0; block < tensor.shape[2]; ++block) visit(Row{b, h, block});
    }
  }
}

void check_indices(const Problem& p, const TileList& list, const ListSlots& slots, const Bindings& bindings) {
  const std::int64_t limit = list.form == TileList::Form::transposed ? p.query_blocks() : p.key_blocks();
  for_each_row(bindings[slots.counts], [&](const Row& row) {
    const Entries partial = check_entries(slots.counts, slots.indices, bindings, row, limit);
    if (!list.full) return;
    check_disjoint(slots.full_indices, row, partial,
                   check_entries(slots.full_counts, slots.full_indices, bindings, row, limit));
  });
}

const std::uint32_t* check_bits(Slot slot, const Tensor& bits, const Row& row, std::int64_t blocks) {
  const std::uint32_t* words = bits.as<const std::uint32_t>() + offset_of(bits, row);
  const std::int64_t last = bits.shape[3] - 1;
  if (blocks % 32 != 0 && (words[last] >> (blocks % 32)) != 0) {
    refuse(slot, row, std::to_string(last), std::to_string(words[last]),
           "no bit at or above block " + std::to_string(blocks));
  }
  return words;
}

void check_bitmask(const Problem& p, const TileList& list, const ListSlots& slots, const Bindings& bindings) {
  const Tensor& bits = bindings[slots.bits];
  if (bits.shape[3] == 0) return;
  for_each_row(bits, [&](const Row& row) {
    const std::uint32_t* partial = check_bits(slots.bits, bits, row, p.key_blocks());
    if (!list.full) return;
    const std::uint32_t* full = check_bits(slots.full_bits, bindings[slots.full_bits], row, p.key_blocks());
    for (std::int64_t w = 0; w < bits.shape[3]; ++w) {
      if ((partial[w] & full[w]) == 0) continue;
      refuse(slots.full_bits, row, std::to_string(w), std::to_string(full[w]), "no bit that tile_bits has too");
    }
  });
}

void check_list(const Problem& p, const TileList& list, const ListSlots& slots, const Bindings& bindings) {
  if (list.form == TileList::Form::bitmask) {
    if (bindings[slots.bits] && (!list.full || bindings[slots.full_bits])) check_bitmask(p, list, slots, bindings);
    return;
  }
  const bool bound = bindings[slots.counts] && bindings[slots.indices] &&
                     (!list.full || (bindings[slots.full_counts] && bindings[slots.full_indices]));
  if (bound) check_indices(p, list, slots, bindings);
}

}  // namespace

void check_lists(const Problem& problem, const Bindings& bindings) {
  if (problem.list) check_list(problem, problem.list, list_slots(false), bindings);
  if (problem.bwd_list) check_list(problem, problem.bwd_list, list_slots(true), bindings);
}

}  // namespace tessera::detail
