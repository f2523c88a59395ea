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
/// nullopt if it cannot be formed.
std::optional<Span> span_of(const Tensor& tensor) noexcept;

/// Dtype, device, rank, shape, strides, alignment, and that its addresses can be formed: its span.
Span check_tensor(std::string_view name, const SlotRule& rule, const Tensor& tensor, Device device);

/// What kernels load and store 16 bytes at a time: the start and every stride between rows of q, k, v, o and their
/// like, unless a row's elements are no multiple of 8 (kv_append), which are moved one by one.
void check_rows(Slot slot, const Tensor& tensor);

/// A slot with a tensor, which has passed check_tensor.
struct BoundSlot {
  Slot slot;
  bool written;
  const Tensor* tensor;
  Span span;
};
/// Outputs against themselves, inputs and each other. `bound`: in the order of the slots.
void check_overlaps(std::span<const BoundSlot> bound);

/// cu_seqlens, seqused, page tables and, for kv_append, room in the cache. Reads host memory.
void check_lengths(const Problem& problem, const Bindings& bindings);
/// q_offset, k_offset and k_offset2. Reads host memory.
void check_offsets(const Problem& problem, const Bindings& bindings);

/// linear_decode, linear_chunk: slots of states, slopes and cursors. Reads host memory.
void check_states(const Problem& problem, const Bindings& bindings);

/// Tile lists: counts, indices, bits, partial against full. Reads host memory.
void check_lists(const Problem& problem, const Bindings& bindings);

}  // namespace tessera::detail
