// SPDX-License-Identifier: Apache-2.0
// What the operations of native sparse attention bind.
#include <algorithm>
#include <limits>

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

/// Compressed keys of any numbers: nothing says that they are means. Those of non_finite are NaN.
void Inputs::bind_nsa_select() {
  bind_query_lengths();
  bind_offsets();
  bind_key_lengths(0);
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  allocate(Slot::q, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk));
  fill_queries(Slot::q);
  set_non_finite_rows(Slot::q, 1);
  const Tensor& k = allocate(Slot::k_pooled, problem_.k_type, pooled_shape(problem_.head_dim_qk));
  fill_pooled(Slot::k_pooled);
  const std::int64_t rows = k.rank == 3 ? k.shape[0] : k.shape[0] * k.shape[1];
  for (const std::int64_t row : values_.non_finite) {
    for (std::int64_t h = 0; h < problem_.heads_kv && row < rows; ++h) {
      const std::int64_t at = reference::token_offset(k, row, h);
      reference::write(k, at + row % problem_.head_dim_qk, std::numeric_limits<double>::quiet_NaN());
    }
  }
  const std::int64_t heads = problem_.nsa.query_heads ? problem_.heads_q : problem_.heads_kv;
  const std::int64_t tiles = (problem_.seqlen_q + problem_.nsa.tile - 1) / problem_.nsa.tile;
  allocate(Slot::selected_counts, DType::int32, {problem_.batch, heads, tiles}, true);
  allocate(Slot::selected_indices, DType::int32, {problem_.batch, heads, tiles, problem_.nsa.top}, true);
  if (problem_.nsa.compressed_top == 0) return;
  allocate(Slot::compressed_counts, DType::int32, {problem_.batch, heads, tiles}, true);
  allocate(Slot::compressed_indices, DType::int32, {problem_.batch, heads, tiles, problem_.nsa.compressed_top}, true);
}

/// Gates of 0 in front of branches that are NaN, one in each seventh row of a head.
void Inputs::shut_branches() {
  const Tensor& gates = bindings_[Slot::gates];
  const Tensor& parts = bindings_[Slot::o_parts];
  Tensor one = parts;
  one.rank = parts.rank - 1;
  std::copy(parts.shape.begin() + 1, parts.shape.end(), one.shape.begin());
  std::copy(parts.strides.begin() + 1, parts.strides.end(), one.strides.begin());
  for (const reference::Rows& rows : sequences_.query) {
    for (std::int64_t i = 0; i < rows.length; ++i) {
      const std::int64_t token = rows.first_token + i, h = i % problem_.heads_q, x = i % parts.shape[0];
      if (i % 7 != 3) continue;
      reference::write(gates, reference::token_offset(gates, token, h) + x, 0.0);
      const std::int64_t at = x * parts.strides[0] + reference::token_offset(one, token, h);
      for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) {
        reference::write(parts, at + c, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
}

/// Rows of the three branches that are in use.
void Inputs::bind_nsa_gate() {
  constexpr std::int64_t kBranches = 3;
  const bool forward = problem_.pass == Pass::forward;
  bind_query_lengths();
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  std::vector<std::int64_t> parts_shape = query_shape(problem_.heads_q, problem_.head_dim_v);
  parts_shape.insert(parts_shape.begin(), kBranches);
  const Tensor parts = allocate(Slot::o_parts, problem_.v_type, parts_shape);
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::o_parts));
  for (std::int64_t x = 0; x < kBranches; ++x) {
    Tensor one = parts;
    one.rank = parts.rank - 1;
    one.byte_offset += x * parts.strides[0] * static_cast<std::int64_t>(size_of(parts.dtype));
    std::copy(parts.shape.begin() + 1, parts.shape.end(), one.shape.begin());
    std::copy(parts.strides.begin() + 1, parts.strides.end(), one.strides.begin());
    for (const reference::Rows& rows : sequences_.query) {
      for (std::int64_t i = 0; i < rows.length; ++i) {
        for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
          const std::int64_t at = reference::token_offset(one, rows.first_token + i, h);
          for (std::int64_t c = 0; c < problem_.head_dim_v; ++c) reference::write(one, at + c, random.normal());
        }
      }
    }
  }
  const auto queries = [this](Slot slot, DType dtype, std::int64_t dim) {
    allocate(slot, dtype, query_shape(problem_.heads_q, dim));
    fill_queries(slot);
  };
  if (problem_.nsa.gate == GateKind::sigmoid) {
    queries(Slot::q, problem_.q_type, problem_.head_dim_qk);
    allocate(Slot::gate_weight, problem_.q_type, {problem_.heads_q, kBranches, problem_.head_dim_qk});
    fill(Slot::gate_weight);
  }
  if (problem_.nsa.gate == GateKind::given) queries(Slot::gates, DType::fp32, kBranches);
  if (forward && problem_.nsa.gate == GateKind::given) shut_branches();
  if (forward) {
    allocate(Slot::o, problem_.o_type, query_shape(problem_.heads_q, problem_.head_dim_v), true);
    return;
  }
  queries(Slot::dout, problem_.o_type, problem_.head_dim_v);
  allocate(Slot::do_parts, problem_.v_type, parts_shape, true);
  if (problem_.nsa.gate == GateKind::sigmoid) {
    allocate(Slot::dq, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk), true);
    allocate(Slot::dgate_weight, DType::fp32, {problem_.heads_q, kBranches, problem_.head_dim_qk}, true);
  }
  if (problem_.nsa.gate == GateKind::given) {
    allocate(Slot::dgates, DType::fp32, query_shape(problem_.heads_q, kBranches), true);
  }
}

}  // namespace tessera::cases
