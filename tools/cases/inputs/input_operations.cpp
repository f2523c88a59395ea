// SPDX-License-Identifier: Apache-2.0
// What each operation binds.
#include <cmath>
#include <limits>

#include "cases/inputs/inputs.h"
#include "cases/inputs/slot_shapes.h"
#include "cpu/reference/number.h"

namespace tessera::cases {
namespace {

constexpr double kExtremeSlopes[] = {0, -0.5, 30, 1e4, 1e-30, -2};
constexpr double kExtremeSinks[] = {-1e30, 60, 1e30, -std::numeric_limits<double>::infinity(), 12, -40};

template <std::size_t N>
double in_turn(const double (&list)[N], std::uint64_t seed, std::int64_t index) {
  return list[(seed + static_cast<std::uint64_t>(index)) % N];
}

}  // namespace

Inputs::Inputs(const Case& of) : case_(of), problem_(case_.problem), values_(case_.values) {
  bindings_.batch_offset = values_.batch_offset;
  bindings_.head_offset = values_.head_offset;
  bind_operation();
  remember();
}

void Inputs::bind_operation() {
  switch (problem_.operation) {
    case Operation::attention:
      return bind_attention();
    case Operation::combine:
      return bind_combine();
    case Operation::kv_append:
      return bind_kv_append();
    case Operation::linear_decode:
      return bind_linear_decode();
    case Operation::linear_chunk:
      return bind_linear_chunk();
    case Operation::nsa_pool:
      return bind_nsa_pool();
    case Operation::nsa_select:
      return bind_nsa_select();
    case Operation::nsa_gate:
      return bind_nsa_gate();
    case Operation::quantize:
      return bind_quantize();
    default:
      return bind_by_rules();
  }
}

/// An operation whose inputs need no values of their own: all that it must have.
void Inputs::bind_by_rules() {
  bind_query_lengths();
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  for (const cli::SlotShape& each : cli::value_inputs(problem_)) {
    allocate(each.slot, each.dtype, each.shape, each.written);
    fill(each.slot);
  }
  for (const cli::SlotShape& each : cli::outputs(problem_)) allocate(each.slot, each.dtype, each.shape, true);
}

/// Keys, and where they and the queries are.
void Inputs::bind_sources() {
  bind_query_lengths();
  bind_key_lengths(0);
  if (problem_.kv2) bind_key_lengths(1);
  bind_offsets();
  sequences_ = reference::resolve_sequences(problem_, bindings_);
  bind_keys(0);
  if (problem_.kv2) bind_keys(1);
}

void Inputs::bind_attention() {
  bind_sources();
  allocate(Slot::q, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk));
  fill_queries(Slot::q);
  apply_input_kind(values_.inputs, problem_, bindings_);
  set_non_finite_keys();
  set_non_finite_rows(Slot::q, 1);
  bind_descales();
  bind_score_parameters();
  bind_list(problem_.list, false);
  bind_list(problem_.bwd_list, true);
  if (problem_.pass == Pass::forward) {
    allocate(Slot::o, problem_.o_type, query_shape(problem_.heads_q, problem_.head_dim_v), true);
    if (problem_.residual) {
      allocate(Slot::o_residual, DType::int8, query_shape(problem_.heads_q, problem_.head_dim_v), true);
    }
    if (problem_.lse) allocate(Slot::lse, DType::fp32, lse_shape(), true);
    bind_tile_outputs();
    bind_skip();
  } else {
    bind_forward_result();
    bind_gradients();
  }
}

void Inputs::bind_keys(std::size_t segment) {
  const KvSource& source = segment == 0 ? problem_.kv : *problem_.kv2;
  const reference::SegmentSlots& slots = reference::segment_slots(segment);
  const bool cache = problem_.operation == Operation::kv_append;  // written in place
  const auto shape = [&](std::int64_t dim) -> std::vector<std::int64_t> {
    if (source.layout == KvLayout::varlen) return {source.total, problem_.heads_kv, dim};
    if (source.layout == KvLayout::dense) return {problem_.batch, source.seqlen, problem_.heads_kv, dim};
    return {source.pages, source.page_size, problem_.heads_kv, dim};
  };
  allocate(slots.k, problem_.k_type, shape(problem_.head_dim_qk), cache);
  allocate(slots.v, problem_.v_type, shape(problem_.head_dim_v), cache);
  fill_keys(segment);
}

void Inputs::bind_score_parameters() {
  if (problem_.alibi) {
    const std::int64_t batches = values_.slopes_per_batch ? problem_.batch : 1;
    const Tensor& slopes = values_.slopes_per_batch
                               ? allocate(Slot::alibi_slopes, DType::fp32, {batches, problem_.heads_q})
                               : allocate(Slot::alibi_slopes, DType::fp32, {problem_.heads_q});
    reference::for_each_element(slopes, [&](std::int64_t index, std::int64_t offset) {
      const std::int64_t batch = index / problem_.heads_q;
      const auto step = static_cast<double>(index % problem_.heads_q + batch + 1);
      const double usual = std::exp2(-8.0 * step / static_cast<double>(problem_.heads_q + batches));
      reference::write(slopes, offset, values_.extreme_slopes ? in_turn(kExtremeSlopes, values_.seed, index) : usual);
    });
  }
  if (problem_.sink) bind_sinks();
  if (problem_.dropout > 0) bind_seeds();
}

void Inputs::bind_sinks() {
  allocate(Slot::sink, DType::fp32, {problem_.heads_q});
  fill(Slot::sink);
  for (std::int64_t h = 0; values_.extreme_sinks && h < problem_.heads_q; ++h) {
    reference::write(bindings_[Slot::sink], h, in_turn(kExtremeSinks, values_.seed, h));
  }
}

void Inputs::bind_seeds() {
  bindings_.seed = values_.drop_seed;
  bindings_.offset = values_.drop_offset;
  if (!values_.drop_scalars) return;
  *allocate(Slot::dropout_seed, DType::uint64, {1}).as<std::uint64_t>() = values_.drop_seed;
  *allocate(Slot::dropout_offset, DType::uint64, {1}).as<std::uint64_t>() = values_.drop_offset;
  bindings_.seed = ~values_.drop_seed;  // the tensors win
  bindings_.offset = ~values_.drop_offset;
}

/// o, its residual and lse as the oracle's forward gives them, in their types.
void Inputs::bind_forward_result() {
  Problem forward = problem_;
  forward.pass = Pass::forward;
  forward.bwd_list = {};
  forward.lse = true;
  forward.dlse = forward.grad_fp32 = forward.accumulate = false;
  allocate(Slot::o, problem_.o_type, query_shape(problem_.heads_q, problem_.head_dim_v));
  if (problem_.residual) allocate(Slot::o_residual, DType::int8, query_shape(problem_.heads_q, problem_.head_dim_v));
  allocate(Slot::lse, DType::fp32, lse_shape());
  reference::Result result = reference::compute(forward, bindings_, reference::Arithmetic::oracle);
  // A backward must not need what a forward writes to padding rows.
  const std::vector<std::int64_t> o_shape = query_shape(problem_.heads_q, problem_.head_dim_v);
  reference::Result used;
  used[Slot::o].values = std::move(result[Slot::o].values);
  used[Slot::lse].values = std::move(result[Slot::lse].values);
  used[Slot::o_residual].values = std::move(result[Slot::o_residual].values);
  used[Slot::o].written.assign(used[Slot::o].values.size(), 0);
  used[Slot::lse].written.assign(used[Slot::lse].values.size(), 0);
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const reference::Rows& rows = sequences_.query[static_cast<std::size_t>(b)];
    for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
      for (std::int64_t i = 0; i < rows.length; ++i) {
        used[Slot::lse].written[static_cast<std::size_t>(reference::lse_index(problem_, b, h, rows, i))] = 1;
        const std::int64_t o_at = ((rows.first_token + i) * problem_.heads_q + h) * problem_.head_dim_v;
        std::fill_n(used[Slot::o].written.begin() + o_at, problem_.head_dim_v, std::uint8_t{1});
      }
    }
  }
  if (problem_.residual) used[Slot::o_residual].written = used[Slot::o].written;
  reference::store(used, bindings_);
}

void Inputs::bind_gradients() {
  allocate(Slot::dout, problem_.o_type, query_shape(problem_.heads_q, problem_.head_dim_v));
  fill_queries(Slot::dout);
  set_non_finite_rows(Slot::dout, 0);
  if (problem_.dlse) {
    allocate(Slot::dlse, DType::fp32, lse_shape());
    fill_lse(Slot::dlse, 0.0, 1.0, 0.0);
  }
  const auto type = [this](DType of) { return problem_.grad_fp32 ? DType::fp32 : of; };
  const auto like = [this](Slot slot) {
    const Tensor& tensor = bindings_[slot];
    return std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
  };
  const auto gradient = [&](Slot slot, DType dtype, std::vector<std::int64_t> shape) {
    allocate(slot, dtype, std::move(shape), true);
    if (problem_.accumulate) fill(slot);
  };
  gradient(Slot::dq, type(problem_.q_type), like(Slot::q));
  gradient(Slot::dk, type(problem_.k_type), like(Slot::k));
  gradient(Slot::dv, type(problem_.v_type), like(Slot::v));
  if (problem_.kv2) {
    gradient(Slot::dk2, type(problem_.k_type), like(Slot::k2));
    gradient(Slot::dv2, type(problem_.v_type), like(Slot::v2));
  }
  if (problem_.sink) gradient(Slot::dsink, DType::fp32, {problem_.heads_q});
}

/// Parts without keys hold −inf and a poisoned output: it must not be read into the sum.
void Inputs::bind_combine() {
  std::vector<std::int64_t> o_shape = query_shape(problem_.heads_q, problem_.head_dim_v);
  std::vector<std::int64_t> parts_shape = o_shape;
  parts_shape.insert(parts_shape.begin(), problem_.combine.parts);
  std::vector<std::int64_t> lse_parts_shape = lse_shape();
  lse_parts_shape.insert(lse_parts_shape.begin(), problem_.combine.parts);
  const Tensor o_parts = allocate(Slot::o_parts, problem_.q_type, parts_shape);
  const Tensor lse_parts = allocate(Slot::lse_parts, DType::fp32, lse_parts_shape);
  RandomNumbers random(values_.seed, static_cast<std::uint64_t>(Slot::o_parts));
  const bool varlen = problem_.q_layout == Layout::varlen;
  const std::int64_t tokens = varlen ? problem_.total_q : problem_.batch * problem_.seqlen_q;
  for (std::int64_t p = 0; p < problem_.combine.parts; ++p) {
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (std::int64_t h = 0; h < problem_.heads_q; ++h) {
        const bool empty = random.chance(0.2);
        std::int64_t o_at = p * o_parts.strides[0];
        std::int64_t lse_at = p * lse_parts.strides[0];
        if (varlen) {
          o_at += token * o_parts.strides[1] + h * o_parts.strides[2];
          lse_at += h * lse_parts.strides[1] + token * lse_parts.strides[2];
        } else {
          const std::int64_t b = token / problem_.seqlen_q;
          const std::int64_t i = token % problem_.seqlen_q;
          o_at += b * o_parts.strides[1] + i * o_parts.strides[2] + h * o_parts.strides[3];
          lse_at += b * lse_parts.strides[1] + h * lse_parts.strides[2] + i * lse_parts.strides[3];
        }
        const double lse = 2.0 + 1.5 * static_cast<double>(random.normal());
        reference::write(lse_parts, lse_at, empty ? -std::numeric_limits<double>::infinity() : lse);
        for (std::int64_t c = 0; !empty && c < problem_.head_dim_v; ++c) {
          reference::write(o_parts, o_at + c, random.normal());
        }
      }
    }
  }
  if (problem_.sink) bind_sinks();
  allocate(Slot::o, problem_.o_type, o_shape, true);
  if (problem_.lse) allocate(Slot::lse, DType::fp32, lse_shape(), true);
}

void Inputs::bind_kv_append() {
  bind_sources();
  set_non_finite_keys();
  allocate(Slot::k_new, problem_.k_type, query_shape(problem_.heads_kv, problem_.head_dim_qk));
  allocate(Slot::v_new, problem_.v_type, query_shape(problem_.heads_kv, problem_.head_dim_v));
  fill_queries(Slot::k_new);
  fill_queries(Slot::v_new);
  if (values_.rotate_q) {
    allocate(Slot::q, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk));
    fill_queries(Slot::q);
    allocate(Slot::q_rotated, problem_.q_type, query_shape(problem_.heads_q, problem_.head_dim_qk), true);
  }
  if (problem_.append.rotary == Rotary::none) return;
  const std::int64_t pairs = problem_.append.rotary_dim / 2;
  const Tensor cos = allocate(Slot::rotary_cos, DType::fp32, {problem_.kv.seqlen, pairs});
  const Tensor sin = allocate(Slot::rotary_sin, DType::fp32, {problem_.kv.seqlen, pairs});
  for (std::int64_t position = 0; position < problem_.kv.seqlen; ++position) {
    for (std::int64_t j = 0; j < pairs; ++j) {
      const double angle =
          static_cast<double>(position) *
          std::pow(10000.0, -2.0 * static_cast<double>(j) / static_cast<double>(problem_.append.rotary_dim));
      reference::write(cos, position * cos.strides[0] + j * cos.strides[1], std::cos(angle));
      reference::write(sin, position * sin.strides[0] + j * sin.strides[1], std::sin(angle));
    }
  }
}

}  // namespace tessera::cases
