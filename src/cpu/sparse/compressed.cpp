// SPDX-License-Identifier: Apache-2.0
#include "cpu/sparse/compressed.h"

namespace tessera::cpu {
namespace {

std::int64_t tokens_of(const Problem& problem, const Bindings& bindings, std::int64_t batch) {
  if (problem.kv.layout == KvLayout::dense) return problem.kv.seqlen;
  const auto* begins = bindings[Slot::cu_seqlens_k].as<const std::int32_t>();
  return begins[batch + 1] - begins[batch];
}

/// The stride of a dimension in bytes; 0 for one element, where the stride may be any number.
std::ptrdiff_t bytes(const Tensor& tensor, std::size_t dimension) {
  return tensor.shape[dimension] > 1 ? tensor.strides[dimension] * static_cast<std::ptrdiff_t>(size_of(tensor.dtype))
                                     : 0;
}

}  // namespace

std::int64_t find_first_blocks(const Problem& problem, const Bindings& bindings, std::int64_t* first_blocks) {
  std::int64_t blocks = 0;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    first_blocks[b] = blocks;
    if (problem.kv.layout == KvLayout::dense) continue;
    blocks += detail::compressed_blocks(problem.nsa, tokens_of(problem, bindings, b));
  }
  return blocks;
}

CompressedSequence find_compressed(const Problem& problem, const Bindings& bindings, std::int64_t batch,
                                   const std::int64_t* first_blocks) {
  const std::int64_t tokens = tokens_of(problem, bindings, batch);
  return {batch, tokens, detail::compressed_blocks(problem.nsa, tokens), first_blocks[batch]};
}

RowView pooled_rows_of(const Problem& problem, const Tensor& tensor, const CompressedSequence& sequence) {
  const std::size_t row = problem.kv.layout == KvLayout::varlen ? 0 : 1;
  RowView view;
  view.row = bytes(tensor, row);
  view.head = bytes(tensor, row + 1);
  view.base = tensor.bytes() + (row == 0 ? sequence.first_block * view.row : sequence.batch * bytes(tensor, 0));
  return view;
}

}  // namespace tessera::cpu
