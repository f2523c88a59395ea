// SPDX-License-Identifier: Apache-2.0
// What the operations of native sparse attention bind.
#include "cases/inputs/inputs.h"
#include "cpu/reference/number.h"

namespace tessera::cases {

std::vector<std::int64_t> Inputs::pooled_shape(std::int64_t dim) const {
  const Nsa& nsa = problem_.nsa;
  if (problem_.kv.layout == KvLayout::varlen) return {problem_.kv.total / nsa.stride, problem_.heads_kv, dim};
  const std::int64_t tokens = problem_.kv.seqlen;
  const std::int64_t blocks = tokens < nsa.length ? 0 : (tokens - nsa.length) / nsa.stride + 1;
  return {problem_.batch, blocks, problem_.heads_kv, dim};
}

/// Rows of blocks that there are; those behind them stay poisoned.
void Inputs::fill_pooled(Slot slot) {
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(slot));
  const Tensor& tensor = bindings_[slot];
  const std::int64_t dim = tensor.shape[static_cast<std::size_t>(tensor.rank - 1)];
  std::int64_t rows = 0;
  for (const reference::Rows& tokens : sequences_.keys[0]) {
    for (std::int64_t end = problem_.nsa.length; end <= tokens.length; end += problem_.nsa.stride) ++rows;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t h = 0; h < problem_.heads_kv; ++h) {
      const std::int64_t at = reference::token_offset(tensor, row, h);
      for (std::int64_t c = 0; c < dim; ++c) reference::write(tensor, at + c, random.normal());
    }
  }
}

void Inputs::bind_nsa_pool() {
  const bool forward = problem_.pass == Pass::forward;
  bind_key_lengths(0);
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  if (forward || problem_.nsa.project) {
    bind_keys(0);
    set_non_finite_keys();
  }
  const auto token_shape = [&](std::int64_t dim) -> std::vector<std::int64_t> {
    if (problem_.kv.layout == KvLayout::varlen) return {problem_.kv.total, problem_.heads_kv, dim};
    return {problem_.batch, problem_.kv.seqlen, problem_.heads_kv, dim};
  };
  const auto side = [&](Slot pooled, Slot dtokens, Slot dpooled, Slot projection, Slot dprojection, DType dtype,
                        std::int64_t dim) {
    if (problem_.nsa.project) {
      allocate(projection, dtype, {problem_.heads_kv, dim, dim});
      fill(projection);
    }
    if (forward) {
      allocate(pooled, dtype, pooled_shape(dim), true);
      return;
    }
    allocate(dpooled, dtype, pooled_shape(dim));
    fill_pooled(dpooled);
    allocate(dtokens, dtype, token_shape(dim), true);
    if (problem_.nsa.project) allocate(dprojection, DType::fp32, {problem_.heads_kv, dim, dim}, true);
  };
  side(Slot::k_pooled, Slot::dk, Slot::dk_pooled, Slot::k_projection, Slot::dk_projection, problem_.k_type,
       problem_.head_dim_qk);
  side(Slot::v_pooled, Slot::dv, Slot::dv_pooled, Slot::v_projection, Slot::dv_projection, problem_.v_type,
       problem_.head_dim_v);
  if (forward && problem_.kv.layout == KvLayout::varlen) {
    allocate(Slot::cu_blocks, DType::int32, {problem_.batch + 1}, true);
  }
}

}  // namespace tessera::cases
