// SPDX-License-Identifier: Apache-2.0
// Checks the contents of a call's integer tensors: lengths, page tables and offsets.

#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

/// Boundaries of `batch` sequences: from 0, non-decreasing, within `capacity`, each sequence at most `longest`.
void check_boundaries(Slot slot, const Tensor& cu, std::int64_t batch, std::int64_t capacity, std::int64_t longest) {
  if (int32_at(cu, 0) != 0) refuse_element(slot, 0, int32_at(cu, 0), "0");
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t begin = int32_at(cu, b);
    const std::int64_t end = int32_at(cu, b + 1);
    if (end < begin) refuse_element(slot, b + 1, end, std::to_string(begin) + " or more, boundaries do not decrease");
    if (end > capacity) refuse_element(slot, b + 1, end, "at most the capacity of " + std::to_string(capacity));
    if (end - begin > longest) {
      refuse_element(
          slot, b + 1, end,
          "a sequence of at most " + std::to_string(longest) + ", this one has " + std::to_string(end - begin));
    }
  }
}

void check_used(Slot slot, const Tensor& used, const Tensor& cu, std::int64_t batch, std::int64_t whole) {
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t most = cu ? int32_at(cu, b + 1) - int32_at(cu, b) : whole;
    if (int32_at(used, b) < 0 || int32_at(used, b) > most) {
      refuse_element(slot, b, int32_at(used, b), "0 to " + std::to_string(most));
    }
  }
}

void check_page(Slot slot, std::int64_t index, std::int64_t page, std::int64_t pages) {
  if (page < 0 || page >= pages) refuse_element(slot, index, page, "a page from 0 to below " + std::to_string(pages));
}

/// Boundaries and page ids of CSR pages.
void check_csr_pages(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  const Tensor& indptr = bindings[slots.page_indptr];
  const Tensor& indices = bindings[slots.page_indices];
  // The number of pages is not limited, because a sequence may hold reserved pages. Its length is limited.
  check_boundaries(slots.page_indptr, indptr, p.batch, indices.shape[0], kMaxSize);
  for (std::int64_t i = 0; i < int32_at(indptr, p.batch); ++i) {
    check_page(slots.page_indices, i, int32_at(indices, i), kv.pages);
  }
}

/// Lengths of sequences in CSR pages.
void check_last_pages(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  const Tensor& indptr = bindings[slots.page_indptr];
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t count = int32_at(indptr, b + 1) - int32_at(indptr, b);
    const std::int64_t tail = int32_at(bindings[slots.last_page_len], b);
    if (count == 0 ? tail != 0 : tail < 1 || tail > kv.page_size) {
      refuse_element(slots.last_page_len, b, tail,
                     count == 0 ? std::string("0, the sequence has no pages") : "1 to " + std::to_string(kv.page_size));
    }
    const std::int64_t length = count == 0 ? 0 : (count - 1) * kv.page_size + tail;
    if (length > kv.seqlen) {
      refuse_element(slots.last_page_len, b, tail,
                     "a sequence of at most " + std::to_string(kv.seqlen) + ", this one has " + std::to_string(length));
    }
  }
}

/// Positions stay within ±2^60, and under a compressed causal mask so does position · stride.
void check_offset(const Problem& p, Slot slot, const Tensor& offsets, bool of_keys) {
  const std::int64_t most = of_keys && p.compressed_causal ? kMaxPosition / p.compressed_causal->stride : kMaxPosition;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t offset = offsets.as<const std::int64_t>()[b];
    if (offset > most || offset < -most) {
      refuse_element(slot, b, offset, "at most " + std::to_string(most) + " either way");
    }
  }
}

}  // namespace

void refuse_element(Slot slot, std::int64_t index, std::int64_t got, std::string want) {
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)),
              "[" + std::to_string(index) + "] = " + std::to_string(got), std::move(want));
}

std::int64_t length_of(const Tensor& cu, const Tensor& used, std::int64_t whole, std::int64_t b) noexcept {
  if (used) return int32_at(used, b);
  return cu ? int32_at(cu, b + 1) - int32_at(cu, b) : whole;
}

void check_query_lengths(const Problem& p, const Bindings& bindings) {
  const Tensor& cu = bindings[Slot::cu_seqlens_q];
  if (cu) check_boundaries(Slot::cu_seqlens_q, cu, p.batch, p.total_q, p.seqlen_q);
  if (const Tensor& used = bindings[Slot::seqused_q]) check_used(Slot::seqused_q, used, cu, p.batch, p.seqlen_q);
}

void check_cache_lengths(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  const Tensor& cu = bindings[slots.cu_seqlens];
  if (cu) check_boundaries(slots.cu_seqlens, cu, p.batch, kv.total, kv.seqlen);
  if (const Tensor& used = bindings[slots.seqused]) check_used(slots.seqused, used, cu, p.batch, kv.seqlen);
  if (kv.layout == KvLayout::paged_csr) check_csr_pages(p, kv, slots, bindings);
}

void check_source_lengths(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  check_cache_lengths(p, kv, slots, bindings);
  if (kv.layout == KvLayout::paged_csr) check_last_pages(p, kv, slots, bindings);
  if (kv.layout != KvLayout::paged_table) return;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    check_table_row(slots.page_table, bindings[slots.page_table], kv, b, int32_at(bindings[slots.seqused], b));
  }
}

void check_table_row(Slot slot, const Tensor& table, const KvSource& kv, std::int64_t b, std::int64_t length) {
  const std::int32_t* row = table.as<const std::int32_t>() + b * table.strides[0];
  const std::int64_t used = ceil_div(length, kv.page_size);
  for (std::int64_t i = 0; i < used; ++i) check_page(slot, b * table.shape[1] + i, row[i], kv.pages);
}

void check_offsets(const Problem& problem, const Bindings& bindings) {
  for (const Slot slot : {Slot::q_offset, Slot::k_offset, Slot::k_offset2}) {
    if (bindings[slot]) check_offset(problem, slot, bindings[slot], slot != Slot::q_offset);
  }
}

}  // namespace tessera::detail
