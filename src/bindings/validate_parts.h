// SPDX-License-Identifier: Apache-2.0
// The checks that validate() is made of. Each throws Error on the first violation and allocates nothing otherwise.
#pragma once

#include <optional>
#include <span>

#include "bindings/slot_rules.h"

namespace tessera::detail {

/// Bytes that a tensor spans, [begin, end) as addresses; empty for a zero-sized tensor.
struct Span {
  std::int64_t begin;
  std::int64_t end;

  [[nodiscard]] bool meets(const Span& other) const noexcept {
    return begin != end && other.begin != other.end && begin < other.end && other.begin < end;
  }
};
/// nullopt if the addresses cannot be formed.
std::optional<Span> span_of(const Tensor& tensor) noexcept;

/// Checks dtype, device, rank, shape, strides, alignment, and that the addresses can be formed. Returns the span.
Span check_tensor(std::string_view name, const SlotRule& rule, const Tensor& tensor, Device device);

/// Checks the alignment of rows that kernels load and store 16 bytes at a time: the start and every stride between rows
/// of q, k, v, o and the like are multiples of 16 bytes, or of 8 bytes for 8-bit elements. Rows with another number of
/// elements than a multiple of 8 (kv_append) are not checked, because they are moved element by element.
void check_rows(Slot slot, const Tensor& tensor);

/// A slot with a tensor, which has passed check_tensor.
struct BoundSlot {
  Slot slot;
  bool written;
  const Tensor* tensor;
  Span span;
};
/// Checks outputs against themselves, inputs and each other. `bound`: in the order of the slots.
void check_overlaps(std::span<const BoundSlot> bound);

// Checks that operations use for tensors in host memory.

/// Throws Error{out_of_range} for an element of an integer tensor.
[[noreturn]] void refuse_element(Slot slot, std::int64_t index, std::int64_t got, std::string want);
/// An element of a one-dimensional int32 tensor.
inline std::int64_t int32_at(const Tensor& tensor, std::int64_t index) noexcept {
  return tensor.as<const std::int32_t>()[index];
}
/// Length of sequence b: `used` if bound, else by the boundaries `cu`, else `whole`.
std::int64_t length_of(const Tensor& cu, const Tensor& used, std::int64_t whole, std::int64_t b) noexcept;

/// cu_seqlens_q and seqused_q.
void check_query_lengths(const Problem& problem, const Bindings& bindings);
/// cu_seqlens, seqused and pages of a source that is read.
void check_source_lengths(const Problem& problem, const KvSource& kv, const SourceSlots& slots,
                          const Bindings& bindings);
/// The same for a cache to which new tokens are appended, without page ids of page tables and last_page_len:
/// check_table_row checks the pages that new tokens need.
void check_cache_lengths(const Problem& problem, const KvSource& kv, const SourceSlots& slots,
                         const Bindings& bindings);
/// Page ids of the first `length` tokens of sequence b in a page table. Entries behind them may be anything.
void check_table_row(Slot slot, const Tensor& table, const KvSource& kv, std::int64_t b, std::int64_t length);
/// q_offset, k_offset and k_offset2.
void check_offsets(const Problem& problem, const Bindings& bindings);
/// Tile lists: counts, indices, bits, partial against full.
void check_lists(const Problem& problem, const Bindings& bindings);
/// The inputs of a skip state's step: thresholds, number, and the blocks that it must or must not compute.
void check_skip_step(const Problem& problem, const Bindings& bindings);

}  // namespace tessera::detail
