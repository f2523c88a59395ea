// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles/sequence.h"

#include "bindings/slot_rules.h"

namespace tessera::cpu {
namespace {

std::int64_t int_at(const Tensor& tensor, std::int64_t index) {
  const std::int64_t at = index * tensor.strides[0];
  return tensor.dtype == DType::int64 ? tensor.as<std::int64_t>()[at] : tensor.as<std::int32_t>()[at];
}

// The stride of a dimension in bytes; 0 for one element, where the stride may be any number, even too large for bytes.
std::ptrdiff_t bytes(const Tensor& tensor, int dimension) {
  const auto at = static_cast<std::size_t>(dimension);
  return tensor.shape[at] > 1 ? tensor.strides[at] * static_cast<std::ptrdiff_t>(size_of(tensor.dtype)) : 0;
}

const KvSource& source_of(const Problem& problem, int segment) { return segment == 0 ? problem.kv : *problem.kv2; }

// Keys of the tensor that belong to the sequence, and how many of them are used.
void key_lengths(const Problem& problem, const Bindings& bindings, int segment, std::int64_t batch, Segment& out) {
  const KvSource& source = source_of(problem, segment);
  const detail::SourceSlots& slots = detail::source_slots(segment == 1);
  switch (source.layout) {
    case KvLayout::dense:
    case KvLayout::paged_table:
      out.capacity = source.seqlen;
      break;
    case KvLayout::varlen:
      out.capacity = int_at(bindings[slots.cu_seqlens], batch + 1) - int_at(bindings[slots.cu_seqlens], batch);
      break;
    case KvLayout::paged_csr: {
      const std::int64_t pages =
          int_at(bindings[slots.page_indptr], batch + 1) - int_at(bindings[slots.page_indptr], batch);
      out.capacity = pages == 0 ? 0 : (pages - 1) * source.page_size + int_at(bindings[slots.last_page_len], batch);
      break;
    }
  }
  out.length = bindings[slots.seqused] ? int_at(bindings[slots.seqused], batch) : out.capacity;
}

}  // namespace

KeyView keys_of(const Problem& problem, const Bindings& bindings, const Tensor& tensor, int segment,
                std::int64_t batch) {
  KeyView view;
  if (!tensor) return view;
  const KvSource& source = source_of(problem, segment);
  const detail::SourceSlots& slots = detail::source_slots(segment == 1);
  view.base = tensor.bytes();
  if (source.layout == KvLayout::varlen) {
    view.row = bytes(tensor, 0);
    view.head = bytes(tensor, 1);
    view.base += int_at(bindings[slots.cu_seqlens], batch) * view.row;
    return view;
  }
  view.row = bytes(tensor, 1);
  view.head = bytes(tensor, 2);
  if (source.layout == KvLayout::dense) {
    view.base += batch * bytes(tensor, 0);
    return view;
  }
  view.page = bytes(tensor, 0);
  view.page_size = source.page_size;
  if (source.layout == KvLayout::paged_table) {
    const Tensor& table = bindings[slots.page_table];
    view.pages = table.as<std::int32_t>() + batch * table.strides[0];
  } else {
    view.pages = bindings[slots.page_indices].as<std::int32_t>() + int_at(bindings[slots.page_indptr], batch);
  }
  return view;
}

namespace {

// Stride of a dimension in elements.
std::ptrdiff_t stride_of(const Tensor& tensor, int dimension) {
  const auto at = static_cast<std::size_t>(dimension);
  return tensor.shape[at] > 1 ? tensor.strides[at] : 0;
}

/// Descales of a sequence's rows. `first`: the sequence's first token, if rows are packed.
DescaleView descales_of(const Problem& problem, const Tensor& tensor, bool packed, std::int64_t batch,
                        std::int64_t first) {
  DescaleView view;
  if (!tensor) return view;
  const Quantization& q = problem.quantization;
  view.base = tensor.as<const float>();
  if (q.grain == Grain::token && packed) {
    view.head = stride_of(tensor, 0);
    view.step = stride_of(tensor, 1);
    view.base += first * view.step;
    return view;
  }
  view.base += batch * stride_of(tensor, 0);
  view.head = stride_of(tensor, 1);
  if (q.grain == Grain::head) return view;
  view.step = stride_of(tensor, 2);
  if (q.grain == Grain::block) view.block = q.block;
  return view;
}

DescaleView key_descales_of(const Problem& problem, const Bindings& bindings, const Tensor& tensor, int segment,
                            std::int64_t batch, const KeyView& keys) {
  const KvSource& source = source_of(problem, segment);
  const bool packed = source.layout == KvLayout::varlen;
  const Tensor& cu = bindings[detail::source_slots(segment == 1).cu_seqlens];
  const bool by_page = keys.pages != nullptr && problem.quantization.grain != Grain::head;
  DescaleView view = descales_of(problem, tensor, packed, by_page ? 0 : batch, packed ? int_at(cu, batch) : 0);
  if (view.base == nullptr || !by_page) return view;
  view.pages = keys.pages;
  view.page_size = keys.page_size;
  view.page = stride_of(tensor, 0);
  return view;
}

void find_descales(const Problem& problem, const Bindings& bindings, std::int64_t batch, Sequence& sequence) {
  sequence.q_descale =
      descales_of(problem, bindings[Slot::q_descale], problem.q_layout == Layout::varlen, batch, sequence.q_first);
  if (problem.quantization.grain == Grain::head) sequence.q_descale_heads = problem.group();
  for (int segment = 0; segment < (problem.kv2 ? 2 : 1); ++segment) {
    Segment& keys = sequence.segments[static_cast<std::size_t>(segment)];
    keys.k_descale = key_descales_of(problem, bindings, bindings[Slot::k_descale], segment, batch, keys.k);
    keys.v_descale = key_descales_of(problem, bindings, bindings[Slot::v_descale], segment, batch, keys.v);
  }
  const Tensor& mean = bindings[Slot::k_mean];
  if (!mean) return;
  sequence.k_mean = mean.as<const float>() + batch * stride_of(mean, 0);
  sequence.k_mean_head = stride_of(mean, 1);
}

}  // namespace

Sequence find_query_rows(const Problem& problem, const Bindings& bindings, std::int64_t batch) {
  Sequence sequence;
  sequence.batch = batch;
  if (problem.q_layout == Layout::varlen) {
    const Tensor& cu = bindings[Slot::cu_seqlens_q];
    sequence.q_first = int_at(cu, batch);
    sequence.q_capacity = int_at(cu, batch + 1) - sequence.q_first;
  } else {
    sequence.q_first = batch * problem.seqlen_q;
    sequence.q_capacity = problem.seqlen_q;
  }
  const Tensor& used = bindings[Slot::seqused_q];
  sequence.q_length = used ? int_at(used, batch) : sequence.q_capacity;
  return sequence;
}

Sequence find_sequence(const Problem& problem, const Bindings& bindings, std::int64_t batch) {
  Sequence sequence = find_query_rows(problem, bindings, batch);
  for (int segment = 0; segment < (problem.kv2 ? 2 : 1); ++segment) {
    Segment& out = sequence.segments[static_cast<std::size_t>(segment)];
    const detail::SourceSlots& slots = detail::source_slots(segment == 1);
    key_lengths(problem, bindings, segment, batch, out);
    const Tensor& offset = bindings[slots.offset];
    const Segment& first = sequence.segments[0];
    const std::int64_t follows = segment == 0 ? 0 : first.position + first.length;
    out.position = offset ? int_at(offset, batch) : follows;
    out.k = keys_of(problem, bindings, bindings[slots.k], segment, batch);
    out.v = keys_of(problem, bindings, bindings[slots.v], segment, batch);
  }
  const Tensor& offset = bindings[Slot::q_offset];
  const std::int64_t aligned = problem.compressed_causal ? 0 : sequence.keys() - sequence.q_length;
  sequence.q_position = offset ? int_at(offset, batch) : aligned;
  if (bindings[Slot::k_descale]) find_descales(problem, bindings, batch, sequence);
  return sequence;
}

RowView rows_of(const Problem& problem, const Tensor& tensor, const Sequence& sequence) {
  RowView view;
  if (!tensor) return view;
  const int row = problem.q_layout == Layout::varlen ? 0 : 1;
  view.row = bytes(tensor, row);
  view.head = bytes(tensor, row + 1);
  view.base = tensor.bytes() + (row == 0 ? sequence.q_first * view.row : sequence.batch * bytes(tensor, 0));
  return view;
}

ScalarView scalars_of(const Problem& problem, const Tensor& tensor, const Sequence& sequence) {
  ScalarView view;
  if (!tensor) return view;
  view.base = tensor.as<float>();
  if (problem.q_layout == Layout::varlen) {
    view.head = tensor.strides[0];
    view.row = tensor.strides[1];
    view.base += sequence.q_first * view.row;
  } else {
    view.head = tensor.strides[1];
    view.row = tensor.strides[2];
    view.base += sequence.batch * tensor.strides[0];
  }
  return view;
}

void load_keys(const Kernels& kernels, const KeyView& view, DType dtype, std::int64_t dim, std::int64_t first,
               std::int64_t count, std::int64_t head, float* target) {
  while (count > 0) {
    const std::int64_t rows = view.run(first, count);
    kernels.load_rows(dtype, view.at(first, head), view.row, rows, dim, 1.0F, target, padded(dim));
    first += rows;
    count -= rows;
    target += rows * padded(dim);
  }
}

void dequantise_keys(const Kernels& kernels, const DescaleView& descales, const float* mean, std::int64_t dim,
                     std::int64_t first, std::int64_t count, std::int64_t head, float* rows) {
  for (std::int64_t row = 0; row < count; ++row, rows += padded(dim)) {
    kernels.scale_rows(1, padded(dim), rows, 0, descales.at(first + row, head));
    for (std::int64_t c = 0; mean != nullptr && c < dim; ++c) rows[c] += mean[c];
  }
}

}  // namespace tessera::cpu
