// SPDX-License-Identifier: Apache-2.0
// A call whose bindings are all right, to be broken one at a time. Shapes are written down here a second time, from
// the comments of tessera/executor.h and not from the library's own table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "tessera/executor.h"

namespace tessera {

class Call {
 public:
  explicit Call(std::string_view line) : problem(Problem::parse(line)) {
    switch (problem.operation) {
      case Operation::attention:
        attention();
        break;
      case Operation::combine:
        combine();
        break;
      case Operation::kv_append:
        kv_append();
        break;
      case Operation::linear_decode:
      case Operation::linear_chunk:
        linear();
        break;
      case Operation::nsa_pool:
        nsa_pool();
        break;
      case Operation::nsa_select:
        nsa_select();
        break;
      case Operation::nsa_gate:
        nsa_gate();
        break;
      case Operation::quantize:
        quantize();
        break;
    }
  }

  Problem problem;
  Bindings bindings;

  Tensor& operator[](Slot slot) { return bindings[slot]; }

  /// Binds fresh memory: room behind and before the tensor, so that a test may shift or stretch it.
  Tensor& bind(Slot slot, DType dtype, std::initializer_list<std::int64_t> shape) {
    const Tensor sizes = Tensor::contiguous(nullptr, dtype, shape);
    const std::size_t bytes = static_cast<std::size_t>(sizes.numel()) * size_of(dtype);
    memory_.push_back(std::make_unique<Block>());
    Block& block = *memory_.back();
    block.bytes.assign(bytes + 2 * kMargin + 64, std::byte{0});
    const auto address = reinterpret_cast<std::uintptr_t>(block.bytes.data()) + kMargin;
    auto* data = reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
    return bindings[slot] = Tensor::contiguous(data, dtype, shape);
  }

  Tensor& bind(Slot slot, std::initializer_list<std::int64_t> shape, std::initializer_list<std::int32_t> values) {
    Tensor& tensor = bind(slot, DType::int32, shape);
    std::copy(values.begin(), values.end(), tensor.as<std::int32_t>());
    return tensor;
  }

  std::int32_t& int32(Slot slot, std::int64_t index) { return bindings[slot].as<std::int32_t>()[index]; }

  /// Every byte that was ever bound.
  [[nodiscard]] std::vector<std::vector<std::byte>> snapshot() const {
    std::vector<std::vector<std::byte>> bytes;
    for (const auto& block : memory_) bytes.push_back(block->bytes);
    return bytes;
  }

  void run() { Executor(make_plan(problem, Target::cpu(1))).run(bindings); }

 private:
  static constexpr std::size_t kMargin = 4096;
  struct Block {
    std::vector<std::byte> bytes;
  };

  bool varlen() const { return problem.q_layout == Layout::varlen; }

  void rows(Slot slot, DType dtype, std::int64_t heads, std::int64_t dim) {
    if (varlen()) {
      bind(slot, dtype, {problem.total_q, heads, dim});
    } else {
      bind(slot, dtype, {problem.batch, problem.seqlen_q, heads, dim});
    }
  }

  void row_scalars(Slot slot) {
    if (varlen()) {
      bind(slot, DType::fp32, {problem.heads_q, problem.total_q});
    } else {
      bind(slot, DType::fp32, {problem.batch, problem.heads_q, problem.seqlen_q});
    }
  }

  void keys(Slot slot, const KvSource& kv, DType dtype, std::int64_t dim) {
    if (kv.layout == KvLayout::dense) {
      bind(slot, dtype, {problem.batch, kv.seqlen, problem.heads_kv, dim});
    } else if (kv.layout == KvLayout::varlen) {
      bind(slot, dtype, {kv.total, problem.heads_kv, dim});
    } else {
      bind(slot, dtype, {kv.pages, kv.page_size, problem.heads_kv, dim});
    }
  }

  /// Every sequence has its full length; pages are handed out in order.
  void lengths(Slot slot, std::int64_t count, std::int64_t step) {
    Tensor& tensor = bind(slot, DType::int32, {count});
    for (std::int64_t i = 0; i < count; ++i) tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * step);
  }
  void constant(Slot slot, std::int64_t value) {
    Tensor& tensor = bind(slot, DType::int32, {problem.batch});
    std::fill_n(tensor.as<std::int32_t>(), problem.batch, static_cast<std::int32_t>(value));
  }
  void source(const KvSource& kv, bool second, std::int64_t used) {
    const auto of = [second](Slot first, Slot other) { return second ? other : first; };
    if (kv.layout == KvLayout::varlen)
      lengths(of(Slot::cu_seqlens_k, Slot::cu_seqlens_k2), problem.batch + 1, kv.seqlen);
    if (kv.seqused) constant(of(Slot::seqused_k, Slot::seqused_k2), used);
    if (kv.page_size == 0) return;
    const std::int64_t pages = (kv.seqlen + kv.page_size - 1) / kv.page_size;
    if (kv.layout == KvLayout::paged_table) {
      Tensor& table = bind(of(Slot::page_table, Slot::page_table2), DType::int32, {problem.batch, pages});
      std::iota(table.as<std::int32_t>(), table.as<std::int32_t>() + table.numel(), 0);
      return;
    }
    lengths(of(Slot::page_indptr, Slot::page_indptr2), problem.batch + 1, pages);
    lengths(of(Slot::page_indices, Slot::page_indices2), problem.batch * pages, 1);
    if (problem.operation == Operation::attention) {
      constant(of(Slot::last_page_len, Slot::last_page_len2), kv.seqlen - (pages - 1) * kv.page_size);
    }
  }

  void index_list(const TileList& list, Slot counts, Slot indices, std::int32_t first) {
    const bool transposed = list.form == TileList::Form::transposed;
    const std::int64_t major = transposed ? problem.key_blocks() : problem.query_blocks();
    const std::int64_t b = list.per_batch ? problem.batch : 1;
    const std::int64_t h = problem.list_heads(list);
    Tensor& count = bind(counts, DType::int32, {b, h, major});
    Tensor& index = bind(indices, DType::int32, {b, h, major, 2});
    for (std::int64_t i = 0; i < count.numel(); ++i) {
      count.as<std::int32_t>()[i] = 1;
      index.as<std::int32_t>()[2 * i] = first;
    }
  }
  void list(const TileList& of, bool backward) {
    const auto slot = [backward](Slot forward, Slot other) { return backward ? other : forward; };
    if (of.form == TileList::Form::bitmask) {
      const std::int64_t b = of.per_batch ? problem.batch : 1;
      const std::int64_t words = (problem.key_blocks() + 31) / 32;
      const auto bits = [&](Slot to, std::uint32_t value) {
        Tensor& tensor = bind(to, DType::uint32, {b, problem.list_heads(of), problem.query_blocks(), words});
        std::fill_n(tensor.as<std::uint32_t>(), tensor.numel(), value);
      };
      bits(slot(Slot::tile_bits, Slot::bwd_tile_bits), 1);
      if (of.full) bits(slot(Slot::full_bits, Slot::bwd_full_bits), 2);
    } else if (of) {
      index_list(of, slot(Slot::tile_counts, Slot::bwd_tile_counts), slot(Slot::tile_indices, Slot::bwd_tile_indices),
                 0);
      if (of.full) {
        index_list(of, slot(Slot::full_counts, Slot::bwd_full_counts), slot(Slot::full_indices, Slot::bwd_full_indices),
                   1);
      }
    }
  }

  void attention() {
    const Problem& p = problem;
    const bool backward = p.pass == Pass::backward;
    const auto gradient = [&p](DType dtype) { return p.grad_fp32 ? DType::fp32 : dtype; };
    rows(Slot::q, p.q_type, p.heads_q, p.head_dim_qk);
    rows(Slot::o, p.o_type, p.heads_q, p.head_dim_v);
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    if (p.seqused_q) constant(Slot::seqused_q, p.seqlen_q);
    for (const bool second : {false, true}) {
      if (second && !p.kv2) continue;
      const KvSource& kv = second ? *p.kv2 : p.kv;
      keys(second ? Slot::k2 : Slot::k, kv, p.k_type, p.head_dim_qk);
      keys(second ? Slot::v2 : Slot::v, kv, p.v_type, p.head_dim_v);
      source(kv, second, kv.seqlen);
      if (!backward) continue;
      keys(second ? Slot::dk2 : Slot::dk, kv, gradient(p.k_type), p.head_dim_qk);
      keys(second ? Slot::dv2 : Slot::dv, kv, gradient(p.v_type), p.head_dim_v);
    }
    descales();
    if (p.alibi) bind(Slot::alibi_slopes, DType::fp32, {p.heads_q});
    if (p.sink) bind(Slot::sink, DType::fp32, {p.heads_q});
    if (p.residual) rows(Slot::o_residual, DType::int8, p.heads_q, p.head_dim_v);
    if (p.lse || backward) row_scalars(Slot::lse);
    list(p.list, false);
    list(p.bwd_list, true);
    if (backward) {
      rows(Slot::dout, p.o_type, p.heads_q, p.head_dim_v);
      rows(Slot::dq, gradient(p.q_type), p.heads_q, p.head_dim_qk);
      if (p.dlse) row_scalars(Slot::dlse);
      if (p.sink) bind(Slot::dsink, DType::fp32, {p.heads_q});
      return;
    }
    if (p.mass_prior_lse) row_scalars(Slot::prior_lse);
    if (p.skip) skip();
    const std::int64_t blocks = p.key_blocks();
    if (p.mass != MassKind::none) bind(Slot::tile_mass, DType::fp32, {p.batch, p.heads_q, p.query_blocks(), blocks});
    if (p.next == TileList::Form::indices) {
      bind(Slot::next_counts, DType::int32, {p.batch, p.heads_q, p.query_blocks()});
      bind(Slot::next_indices, DType::int32, {p.batch, p.heads_q, p.query_blocks(), blocks});
    } else if (p.next == TileList::Form::bitmask) {
      bind(Slot::next_bits, DType::uint32, {p.batch, p.heads_q, p.query_blocks(), (blocks + 31) / 32});
    }
  }

  void skip() {
    const Problem& p = problem;
    const std::int64_t blocks = p.key_blocks();
    bind(Slot::skip_threshold, DType::fp32, {p.heads_q});
    bind(Slot::must_do_bits, DType::uint32, {(blocks + 31) / 32});
    bind(Slot::must_skip_bits, DType::uint32, {(blocks + 31) / 32});
    if (p.skip.kind == SkipRule::Kind::threshold) {
      bind(Slot::skip_step, DType::int32, {1});
      return;
    }
    bind(Slot::skip_memory, DType::uint8, {p.batch, p.heads_q, p.query_blocks(), blocks});
    row_scalars(Slot::skip_lse);
  }

  void combine() {
    const Problem& p = problem;
    rows(Slot::o, p.o_type, p.heads_q, p.head_dim_v);
    if (p.lse) row_scalars(Slot::lse);
    if (p.sink) bind(Slot::sink, DType::fp32, {p.heads_q});
    if (varlen()) {
      bind(Slot::o_parts, p.q_type, {p.combine.parts, p.total_q, p.heads_q, p.head_dim_v});
      bind(Slot::lse_parts, DType::fp32, {p.combine.parts, p.heads_q, p.total_q});
    } else {
      bind(Slot::o_parts, p.q_type, {p.combine.parts, p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
      bind(Slot::lse_parts, DType::fp32, {p.combine.parts, p.batch, p.heads_q, p.seqlen_q});
    }
  }

  void kv_append() {
    const Problem& p = problem;
    keys(Slot::k, p.kv, p.k_type, p.head_dim_qk);
    keys(Slot::v, p.kv, p.v_type, p.head_dim_v);
    rows(Slot::k_new, p.k_type, p.heads_kv, p.head_dim_qk);
    rows(Slot::v_new, p.v_type, p.heads_kv, p.head_dim_v);
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    if (p.seqused_q) constant(Slot::seqused_q, p.seqlen_q);
    source(p.kv, false, p.kv.seqlen - p.seqlen_q);
    if (p.append.rotary == Rotary::none) return;
    bind(Slot::rotary_cos, DType::fp32, {p.kv.seqlen, p.append.rotary_dim / 2});
    bind(Slot::rotary_sin, DType::fp32, {p.kv.seqlen, p.append.rotary_dim / 2});
    rows(Slot::q, p.q_type, p.heads_q, p.head_dim_qk);
    rows(Slot::q_rotated, p.q_type, p.heads_q, p.head_dim_qk);
  }

  void linear() {
    const Problem& p = problem;
    const bool backward = p.pass == Pass::backward;
    if (!p.only_flushes()) {
      rows(Slot::q, p.q_type, p.heads_q, p.head_dim_qk);
      rows(Slot::k, p.k_type, p.heads_q, p.head_dim_qk);
      rows(Slot::v, p.v_type, p.heads_q, p.head_dim_v);
      rows(backward ? Slot::dout : Slot::o, p.o_type, p.heads_q, p.head_dim_v);
    }
    if (backward) {
      rows(Slot::dq, p.q_type, p.heads_q, p.head_dim_qk);
      rows(Slot::dk, p.k_type, p.heads_q, p.head_dim_qk);
      rows(Slot::dv, p.v_type, p.heads_q, p.head_dim_v);
    }
    bind(Slot::decay_slopes, DType::fp32, {p.heads_q});
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    if (p.operation == Operation::linear_chunk && p.linear.states == 0) return;
    const bool vk = p.linear.state_layout == StateLayout::vk;
    const std::int64_t outer = vk ? p.head_dim_v : p.head_dim_qk, inner = vk ? p.head_dim_qk : p.head_dim_v;
    bind(Slot::state, p.linear.state_type, {p.linear.states, p.heads_q, outer, inner});
    lengths(Slot::state_slots, p.batch, 1);
    if (p.linear.ring > 0) {
      bind(Slot::ring_k, p.k_type, {p.linear.states, p.heads_q, 2 * p.linear.ring, p.head_dim_qk});
      bind(Slot::ring_v, p.v_type, {p.linear.states, p.heads_q, 2 * p.linear.ring, p.head_dim_v});
      constant(Slot::ring_cursor, p.linear.ring);
    }
    if (!backward) return;
    bind(Slot::dstate_final, DType::fp32, {p.batch, p.heads_q, outer, inner});
    bind(Slot::dstate_initial, DType::fp32, {p.batch, p.heads_q, outer, inner});
  }

  void pooled(Slot slot, DType dtype, std::int64_t dim) {
    const Nsa& nsa = problem.nsa;
    const std::int64_t blocks = problem.kv.seqlen < nsa.length ? 0 : (problem.kv.seqlen - nsa.length) / nsa.stride + 1;
    if (problem.kv.layout == KvLayout::varlen) {
      bind(slot, dtype, {problem.kv.total / nsa.stride, problem.heads_kv, dim});
    } else {
      bind(slot, dtype, {problem.batch, blocks, problem.heads_kv, dim});
    }
  }

  /// Ones: bytes of zeros are no descales.
  void ones(Slot slot, std::initializer_list<std::int64_t> shape) {
    Tensor& tensor = bind(slot, DType::fp32, shape);
    std::fill_n(tensor.as<float>(), tensor.numel(), 1.0F);
  }
  void query_descales(Slot slot) {
    const Problem& p = problem;
    const std::int64_t blocks = (p.seqlen_q + p.quantization.block - 1) / p.quantization.block;
    if (p.quantization.grain == Grain::head) return ones(slot, {p.batch, p.heads_kv});
    if (p.quantization.grain == Grain::block) return ones(slot, {p.batch, p.heads_q, blocks});
    if (varlen()) return ones(slot, {p.heads_q, p.total_q});
    ones(slot, {p.batch, p.heads_q, p.seqlen_q});
  }
  void key_descales(Slot slot) {
    const Problem& p = problem;
    const bool by_token = p.quantization.grain == Grain::token;
    const std::int64_t step = by_token ? 1 : p.quantization.block;
    if (p.quantization.grain == Grain::head) return ones(slot, {p.batch, p.heads_kv});
    if (p.kv.page_size > 0) return ones(slot, {p.kv.pages, p.heads_kv, p.kv.page_size / step});
    if (by_token && p.kv.layout == KvLayout::varlen) return ones(slot, {p.heads_kv, p.kv.total});
    ones(slot, {p.batch, p.heads_kv, (p.kv.seqlen + step - 1) / step});
  }
  void descales() {
    const Problem& p = problem;
    if (size_of(p.q_type) == 1) query_descales(Slot::q_descale);
    if (size_of(p.k_type) == 1) key_descales(Slot::k_descale);
    if (size_of(p.v_type) == 1) key_descales(Slot::v_descale);
    if (p.quantization.smooth) bind(Slot::k_mean, DType::fp32, {p.batch, p.heads_kv, p.head_dim_qk});
  }

  void quantize() {
    const Problem& p = problem;
    rows(Slot::x, p.q_type, p.heads_q, p.head_dim_qk);
    rows(Slot::x_quantized, p.o_type, p.heads_q, p.head_dim_qk);
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    if (p.seqused_q) constant(Slot::seqused_q, p.seqlen_q);
    query_descales(Slot::x_descale);
    if (p.quantization.smooth) bind(Slot::x_mean, DType::fp32, {p.batch, p.heads_q, p.head_dim_qk});
    if (p.quantization.counts) bind(Slot::saturated, DType::int64, {1});
  }

  void nsa_pool() {
    const Problem& p = problem;
    const bool backward = p.pass == Pass::backward;
    source(p.kv, false, 0);
    if (p.kv.layout == KvLayout::varlen && !backward) bind(Slot::cu_blocks, DType::int32, {p.batch + 1});
    if (!backward || p.nsa.project) {
      keys(Slot::k, p.kv, p.k_type, p.head_dim_qk);
      keys(Slot::v, p.kv, p.v_type, p.head_dim_v);
    }
    if (p.nsa.project) {
      bind(Slot::k_projection, p.k_type, {p.heads_kv, p.head_dim_qk, p.head_dim_qk});
      bind(Slot::v_projection, p.v_type, {p.heads_kv, p.head_dim_v, p.head_dim_v});
    }
    pooled(backward ? Slot::dk_pooled : Slot::k_pooled, p.k_type, p.head_dim_qk);
    pooled(backward ? Slot::dv_pooled : Slot::v_pooled, p.v_type, p.head_dim_v);
    if (!backward) return;
    keys(Slot::dk, p.kv, p.k_type, p.head_dim_qk);
    keys(Slot::dv, p.kv, p.v_type, p.head_dim_v);
    if (!p.nsa.project) return;
    bind(Slot::dk_projection, DType::fp32, {p.heads_kv, p.head_dim_qk, p.head_dim_qk});
    bind(Slot::dv_projection, DType::fp32, {p.heads_kv, p.head_dim_v, p.head_dim_v});
  }

  void nsa_select() {
    const Problem& p = problem;
    rows(Slot::q, p.q_type, p.heads_q, p.head_dim_qk);
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    source(p.kv, false, 0);
    pooled(Slot::k_pooled, p.k_type, p.head_dim_qk);
    const std::int64_t heads = p.nsa.query_heads ? p.heads_q : p.heads_kv;
    const std::int64_t tiles = (p.seqlen_q + p.nsa.tile - 1) / p.nsa.tile;
    bind(Slot::selected_counts, DType::int32, {p.batch, heads, tiles});
    bind(Slot::selected_indices, DType::int32, {p.batch, heads, tiles, p.nsa.top});
    if (p.nsa.compressed_top == 0) return;
    bind(Slot::compressed_counts, DType::int32, {p.batch, heads, tiles});
    bind(Slot::compressed_indices, DType::int32, {p.batch, heads, tiles, p.nsa.compressed_top});
  }

  void branches(Slot slot, DType dtype) {
    if (varlen()) {
      bind(slot, dtype, {3, problem.total_q, problem.heads_q, problem.head_dim_v});
    } else {
      bind(slot, dtype, {3, problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v});
    }
  }

  void nsa_gate() {
    const Problem& p = problem;
    const bool backward = p.pass == Pass::backward;
    const bool sigmoid = p.nsa.gate == GateKind::sigmoid, given = p.nsa.gate == GateKind::given;
    branches(Slot::o_parts, p.v_type);
    if (varlen()) lengths(Slot::cu_seqlens_q, p.batch + 1, p.seqlen_q);
    if (sigmoid) rows(Slot::q, p.q_type, p.heads_q, p.head_dim_qk);
    if (sigmoid) bind(Slot::gate_weight, p.q_type, {p.heads_q, 3, p.head_dim_qk});
    if (given) rows(Slot::gates, DType::fp32, p.heads_q, 3);
    rows(backward ? Slot::dout : Slot::o, p.o_type, p.heads_q, p.head_dim_v);
    if (!backward) return;
    branches(Slot::do_parts, p.v_type);
    if (sigmoid) rows(Slot::dq, p.q_type, p.heads_q, p.head_dim_qk);
    if (sigmoid) bind(Slot::dgate_weight, DType::fp32, {p.heads_q, 3, p.head_dim_qk});
    if (given) rows(Slot::dgates, DType::fp32, p.heads_q, 3);
  }

  std::vector<std::unique_ptr<Block>> memory_;
};

}  // namespace tessera
