// SPDX-License-Identifier: Apache-2.0
// Lengths, page tables and offsets: what is inside the integer tensors of a call.

#include "base/checked.h"
#include "bindings/validate_parts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

[[noreturn]] void refuse(Slot slot, std::int64_t index, std::int64_t got, std::string want) {
  throw Error(ErrorCode::out_of_range, std::string(to_string(slot)),
              "[" + std::to_string(index) + "] = " + std::to_string(got), std::move(want));
}

/// Elements of a validated one-dimensional int32 tensor.
std::int64_t at(const Tensor& tensor, std::int64_t index) noexcept { return tensor.as<const std::int32_t>()[index]; }

/// Boundaries of `batch` runs: from 0, non-decreasing, within `capacity`, each run at most `longest`.
void check_boundaries(Slot slot, const Tensor& cu, std::int64_t batch, std::int64_t capacity, std::int64_t longest) {
  if (at(cu, 0) != 0) refuse(slot, 0, at(cu, 0), "0");
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t begin = at(cu, b);
    const std::int64_t end = at(cu, b + 1);
    if (end < begin) refuse(slot, b + 1, end, std::to_string(begin) + " or more, boundaries do not decrease");
    if (end > capacity) refuse(slot, b + 1, end, "at most the capacity of " + std::to_string(capacity));
    if (end - begin > longest) {
      refuse(slot, b + 1, end,
             "a sequence of at most " + std::to_string(longest) + ", this one has " + std::to_string(end - begin));
    }
  }
}

/// Length of sequence b in rows laid out by `cu` (or `whole` rows when dense), `used` of them if bound.
std::int64_t length_of(const Tensor& cu, const Tensor& used, std::int64_t whole, std::int64_t b) noexcept {
  if (used) return at(used, b);
  return cu ? at(cu, b + 1) - at(cu, b) : whole;
}

void check_used(Slot slot, const Tensor& used, const Tensor& cu, std::int64_t batch, std::int64_t whole) {
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t most = cu ? at(cu, b + 1) - at(cu, b) : whole;
    if (at(used, b) < 0 || at(used, b) > most) refuse(slot, b, at(used, b), "0 to " + std::to_string(most));
  }
}

void check_page(Slot slot, std::int64_t index, std::int64_t page, std::int64_t pages) {
  if (page < 0 || page >= pages) refuse(slot, index, page, "a page from 0 to below " + std::to_string(pages));
}

/// Only entries that `length` reaches are read; what lies behind them may be anything.
void check_table_row(Slot slot, const Tensor& table, const KvSource& kv, std::int64_t b, std::int64_t length) {
  const std::int32_t* row = table.as<const std::int32_t>() + b * table.strides[0];
  const std::int64_t used = ceil_div(length, kv.page_size);
  for (std::int64_t i = 0; i < used; ++i) check_page(slot, b * table.shape[1] + i, row[i], kv.pages);
}

void check_csr(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  const Tensor& indptr = bindings[slots.page_indptr];
  const Tensor& indices = bindings[slots.page_indices];
  const Tensor& last = bindings[slots.last_page_len];
  // The page count has no limit of its own: a sequence may hold reserved pages; its length has one.
  check_boundaries(slots.page_indptr, indptr, p.batch, indices.shape[0], kMaxSize);
  const bool appends = p.operation == Operation::kv_append;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t begin = at(indptr, b);
    const std::int64_t count = at(indptr, b + 1) - begin;
    for (std::int64_t i = begin; i < begin + count; ++i) {
      check_page(slots.page_indices, i, at(indices, i), kv.pages);
    }
    if (appends) continue;
    const std::int64_t tail = at(last, b);
    if (count == 0 ? tail != 0 : tail < 1 || tail > kv.page_size) {
      refuse(slots.last_page_len, b, tail,
             count == 0 ? std::string("0, the sequence has no pages") : "1 to " + std::to_string(kv.page_size));
    }
    const std::int64_t length = count == 0 ? 0 : (count - 1) * kv.page_size + tail;
    if (length > kv.seqlen) {
      refuse(slots.last_page_len, b, tail,
             "a sequence of at most " + std::to_string(kv.seqlen) + ", this one has " + std::to_string(length));
    }
  }
}

void check_source(const Problem& p, const KvSource& kv, const SourceSlots& slots, const Bindings& bindings) {
  const Tensor& cu = bindings[slots.cu_seqlens];
  const Tensor& used = bindings[slots.seqused];
  if (cu) check_boundaries(slots.cu_seqlens, cu, p.batch, kv.total, kv.seqlen);
  if (used) check_used(slots.seqused, used, cu, p.batch, kv.seqlen);
  if (kv.layout == KvLayout::paged_csr) check_csr(p, kv, slots, bindings);
  if (kv.layout != KvLayout::paged_table || p.operation == Operation::kv_append) return;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    check_table_row(slots.page_table, bindings[slots.page_table], kv, b, at(used, b));
  }
}

/// The new tokens of every sequence have room behind those already in the cache, and a row of the rotary tables.
void check_append(const Problem& p, const Bindings& bindings) {
  const Tensor& before = bindings[Slot::seqused_k];
  const Tensor& indptr = bindings[Slot::page_indptr];
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t fresh = length_of(bindings[Slot::cu_seqlens_q], bindings[Slot::seqused_q], p.seqlen_q, b);
    const std::int64_t after = at(before, b) + fresh;
    if (after > p.kv.seqlen) {
      refuse(Slot::seqused_k, b, at(before, b),
             "room for " + std::to_string(fresh) + " new tokens in a cache of " + std::to_string(p.kv.seqlen));
    }
    if (p.kv.layout == KvLayout::paged_table) {
      check_table_row(Slot::page_table, bindings[Slot::page_table], p.kv, b, after);
    } else if (p.kv.layout == KvLayout::paged_csr) {
      const std::int64_t pages = at(indptr, b + 1) - at(indptr, b);
      if (ceil_div(after, p.kv.page_size) > pages) {
        refuse(Slot::page_indptr, b + 1, at(indptr, b + 1),
               std::to_string(ceil_div(after, p.kv.page_size)) + " pages for sequence " + std::to_string(b));
      }
    }
    if (p.rotary == Rotary::none || fresh == 0) continue;
    for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) {
      if (bindings[slot].shape[0] < after) {
        throw Error(ErrorCode::out_of_range, std::string(to_string(slot)), bindings[slot].describe(),
                    std::to_string(after) + " positions for sequence " + std::to_string(b));
      }
    }
  }
}

/// Positions stay within ±2^60, and under an compressed causal mask so does position · stride.
void check_offset(const Problem& p, Slot slot, const Tensor& offsets, bool of_keys) {
  const std::int64_t most = of_keys && p.compressed_causal ? kMaxPosition / p.compressed_causal->stride : kMaxPosition;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t offset = offsets.as<const std::int64_t>()[b];
    if (offset > most || offset < -most) refuse(slot, b, offset, "at most " + std::to_string(most) + " either way");
  }
}

}  // namespace

void check_lengths(const Problem& problem, const Bindings& bindings) {
  const Tensor& cu = bindings[Slot::cu_seqlens_q];
  if (cu) check_boundaries(Slot::cu_seqlens_q, cu, problem.batch, problem.total_q, problem.seqlen_q);
  if (const Tensor& used = bindings[Slot::seqused_q]) {
    check_used(Slot::seqused_q, used, cu, problem.batch, problem.seqlen_q);
  }
  if (problem.operation == Operation::combine) return;
  check_source(problem, problem.kv, source_slots(false), bindings);
  if (problem.kv2) check_source(problem, *problem.kv2, source_slots(true), bindings);
  if (problem.operation == Operation::kv_append) check_append(problem, bindings);
}

void check_offsets(const Problem& problem, const Bindings& bindings) {
  for (const Slot slot : {Slot::q_offset, Slot::k_offset, Slot::k_offset2}) {
    if (bindings[slot]) check_offset(problem, slot, bindings[slot], slot != Slot::q_offset);
  }
}

}  // namespace tessera::detail
