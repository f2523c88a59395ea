// SPDX-License-Identifier: Apache-2.0
#include "cpu/reference/sequences.h"

#include "cpu/reference/number.h"

namespace tessera::reference {
namespace {

std::int64_t integer(const Tensor& tensor, std::int64_t index) {
  return static_cast<std::int64_t>(read(tensor, index * tensor.strides[0]));
}

Rows query_rows(const Problem& problem, const Bindings& bindings, std::int64_t b) {
  Rows rows;
  if (problem.q_layout == Layout::varlen) {
    rows.first_token = integer(bindings[Slot::cu_seqlens_q], b);
    rows.capacity = integer(bindings[Slot::cu_seqlens_q], b + 1) - rows.first_token;
  } else {
    rows.first_token = b * problem.seqlen_q;
    rows.capacity = problem.seqlen_q;
  }
  const Tensor& used = bindings[Slot::seqused_q];
  rows.length = used ? integer(used, b) : rows.capacity;
  return rows;
}

Rows key_rows(const KvSource& source, const SegmentSlots& slots, const Bindings& bindings, std::int64_t b) {
  Rows rows;
  const Tensor& used = bindings[slots.seqused];
  switch (source.layout) {
    case KvLayout::dense:
      rows.first_token = b * source.seqlen;
      rows.capacity = source.seqlen;
      break;
    case KvLayout::varlen:
      rows.first_token = integer(bindings[slots.cu_seqlens], b);
      rows.capacity = integer(bindings[slots.cu_seqlens], b + 1) - rows.first_token;
      break;
    case KvLayout::paged_table:
      break;
    case KvLayout::paged_csr: {
      const std::int64_t pages = integer(bindings[slots.indptr], b + 1) - integer(bindings[slots.indptr], b);
      const Tensor& last = bindings[slots.last_page_len];
      if (last && pages > 0) rows.capacity = (pages - 1) * source.page_size + integer(last, b);
      break;
    }
  }
  rows.length = used ? integer(used, b) : rows.capacity;
  return rows;
}

}  // namespace

const SegmentSlots& segment_slots(std::size_t segment) noexcept {
  static constexpr std::array<SegmentSlots, 2> kSlots{{
      {Slot::k, Slot::v, Slot::dk, Slot::dv, Slot::cu_seqlens_k, Slot::seqused_k, Slot::page_table, Slot::page_indptr,
       Slot::page_indices, Slot::last_page_len, Slot::k_offset},
      {Slot::k2, Slot::v2, Slot::dk2, Slot::dv2, Slot::cu_seqlens_k2, Slot::seqused_k2, Slot::page_table2,
       Slot::page_indptr2, Slot::page_indices2, Slot::last_page_len2, Slot::k_offset2},
  }};
  return kSlots[segment];
}

Sequences resolve_sequences(const Problem& problem, const Bindings& bindings) {
  Sequences all;
  const auto batch = static_cast<std::size_t>(problem.batch);
  const std::size_t segments = problem.kv2 ? 2 : 1;
  all.query.resize(batch);
  all.keys.assign(segments, std::vector<Rows>(batch));
  all.query_tokens = problem.q_layout == Layout::varlen ? problem.total_q : problem.batch * problem.seqlen_q;
  for (std::size_t s = 0; s < segments; ++s) {
    const KvSource& source = s == 0 ? problem.kv : *problem.kv2;
    all.key_tokens.push_back(source.layout == KvLayout::dense    ? problem.batch * source.seqlen
                             : source.layout == KvLayout::varlen ? source.total
                                                                 : source.pages * source.page_size);
  }
  for (std::size_t b = 0; b < batch; ++b) {
    const auto index = static_cast<std::int64_t>(b);
    Rows& query = all.query[b];
    query = query_rows(problem, bindings, index);
    std::int64_t total_keys = 0;
    std::int64_t next_position = 0;
    for (std::size_t s = 0; s < segments; ++s) {
      const KvSource& source = s == 0 ? problem.kv : *problem.kv2;
      Rows& keys = all.keys[s][b];
      keys = key_rows(source, segment_slots(s), bindings, index);
      const Tensor& offset = bindings[segment_slots(s).offset];
      keys.position = offset ? integer(offset, index) : next_position;
      next_position = keys.position + keys.length;
      total_keys += keys.length;
    }
    const Tensor& offset = bindings[Slot::q_offset];
    query.position = offset ? integer(offset, index) : problem.compressed_causal ? 0 : total_keys - query.length;
  }
  return all;
}

std::int64_t key_token(const Problem& problem, const Bindings& bindings, std::size_t segment, std::int64_t batch,
                       const Rows& rows, std::int64_t index) {
  const KvSource& source = segment == 0 ? problem.kv : *problem.kv2;
  const SegmentSlots& slots = segment_slots(segment);
  if (source.layout == KvLayout::paged_table) {
    const Tensor& table = bindings[slots.table];
    const auto page =
        static_cast<std::int64_t>(read(table, batch * table.strides[0] + index / source.page_size * table.strides[1]));
    return page * source.page_size + index % source.page_size;
  }
  if (source.layout == KvLayout::paged_csr) {
    const std::int64_t entry = integer(bindings[slots.indptr], batch) + index / source.page_size;
    return integer(bindings[slots.indices], entry) * source.page_size + index % source.page_size;
  }
  return rows.first_token + index;
}

std::int64_t token_offset(const Tensor& tensor, std::int64_t token, std::int64_t head) {
  if (tensor.rank == 3) return token * tensor.strides[0] + head * tensor.strides[1];
  return token / tensor.shape[1] * tensor.strides[0] + token % tensor.shape[1] * tensor.strides[1] +
         head * tensor.strides[2];
}

std::vector<double> load_row(const Tensor& tensor, std::int64_t token, std::int64_t head, std::int64_t dim) {
  std::vector<double> row(static_cast<std::size_t>(dim));
  const std::int64_t at = token_offset(tensor, token, head);
  for (std::int64_t c = 0; c < dim; ++c) row[static_cast<std::size_t>(c)] = read(tensor, at + c);
  return row;
}

std::int64_t lse_index(const Problem& problem, std::int64_t batch, std::int64_t head, const Rows& rows,
                       std::int64_t row) {
  if (problem.q_layout == Layout::varlen) return head * problem.total_q + rows.first_token + row;
  return (batch * problem.heads_q + head) * problem.seqlen_q + row;
}

std::int64_t lse_offset(const Tensor& tensor, std::int64_t batch, std::int64_t head, const Rows& rows,
                        std::int64_t row) {
  if (tensor.rank == 2) return head * tensor.strides[0] + (rows.first_token + row) * tensor.strides[1];
  return batch * tensor.strides[0] + head * tensor.strides[1] + row * tensor.strides[2];
}

TileStates::TileStates(const Problem& problem, const TileList& list, const Bindings& bindings, bool backward_slots)
    : list_(list),
      batches_(list.per_batch ? problem.batch : 1),
      heads_(problem.list_heads(list)),
      group_(problem.group()),
      query_blocks_(problem.query_blocks()),
      key_blocks_(problem.key_blocks()) {
  if (!list) return;
  states_.assign(static_cast<std::size_t>(batches_ * heads_ * query_blocks_ * key_blocks_), TileState::skipped);
  if (list.form == TileList::Form::bitmask) {
    mark_bits(bindings[backward_slots ? Slot::bwd_tile_bits : Slot::tile_bits], TileState::partial);
    if (list.full) mark_bits(bindings[backward_slots ? Slot::bwd_full_bits : Slot::full_bits], TileState::full);
    if (!problem.skip) return;
    mark_blocks(bindings[Slot::must_do_bits], TileState::partial);
    mark_blocks(bindings[Slot::must_skip_bits], TileState::skipped);
    return;
  }
  mark(bindings[backward_slots ? Slot::bwd_tile_counts : Slot::tile_counts],
       bindings[backward_slots ? Slot::bwd_tile_indices : Slot::tile_indices], TileState::partial);
  if (list.full) {
    mark(bindings[backward_slots ? Slot::bwd_full_counts : Slot::full_counts],
         bindings[backward_slots ? Slot::bwd_full_indices : Slot::full_indices], TileState::full);
  }
}

TileState TileStates::at(std::int64_t batch, std::int64_t head_q, std::int64_t query_block,
                         std::int64_t key_block) const noexcept {
  if (!list_) return TileState::partial;
  const std::int64_t b = list_.per_batch ? batch : 0;
  const std::int64_t h = list_.heads == TileList::Heads::q    ? head_q
                         : list_.heads == TileList::Heads::kv ? head_q / group_
                                                              : 0;
  return states_[static_cast<std::size_t>(((b * heads_ + h) * query_blocks_ + query_block) * key_blocks_ + key_block)];
}

void TileStates::mark(const Tensor& counts, const Tensor& indices, TileState state) {
  const bool by_key = list_.form == TileList::Form::transposed;
  for (std::int64_t b = 0; b < batches_; ++b) {
    for (std::int64_t h = 0; h < heads_; ++h) {
      for (std::int64_t major = 0; major < (by_key ? key_blocks_ : query_blocks_); ++major) {
        const auto count = static_cast<std::int64_t>(
            read(counts, b * counts.strides[0] + h * counts.strides[1] + major * counts.strides[2]));
        for (std::int64_t entry = 0; entry < count; ++entry) {
          const auto minor =
              static_cast<std::int64_t>(read(indices, b * indices.strides[0] + h * indices.strides[1] +
                                                          major * indices.strides[2] + entry * indices.strides[3]));
          const std::int64_t query_block = by_key ? minor : major;
          const std::int64_t key_block = by_key ? major : minor;
          states_[static_cast<std::size_t>(((b * heads_ + h) * query_blocks_ + query_block) * key_blocks_ +
                                           key_block)] = state;
        }
      }
    }
  }
}

void TileStates::mark_bits(const Tensor& bits, TileState state) {
  for (std::int64_t row = 0; row < batches_ * heads_ * query_blocks_; ++row) {
    const std::int64_t b = row / query_blocks_ / heads_;
    const std::int64_t h = row / query_blocks_ % heads_;
    const std::int64_t offset = b * bits.strides[0] + h * bits.strides[1] + row % query_blocks_ * bits.strides[2];
    for (std::int64_t block = 0; block < key_blocks_; ++block) {
      const auto word = static_cast<std::uint32_t>(read(bits, offset + block / 32 * bits.strides[3]));
      if ((word >> (block % 32)) & 1U) states_[static_cast<std::size_t>(row * key_blocks_ + block)] = state;
    }
  }
}

/// Marks the key blocks of `bits` (words) for every row. Does nothing if `bits` is unbound.
void TileStates::mark_blocks(const Tensor& bits, TileState state) {
  for (std::int64_t block = 0; bits && block < key_blocks_; ++block) {
    if (((static_cast<std::uint32_t>(read(bits, block / 32)) >> (block % 32)) & 1U) == 0) continue;
    for (std::int64_t row = 0; row < batches_ * heads_ * query_blocks_; ++row) {
      states_[static_cast<std::size_t>(row * key_blocks_ + block)] = state;
    }
  }
}

}  // namespace tessera::reference
