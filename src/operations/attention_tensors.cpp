// SPDX-License-Identifier: Apache-2.0
// Which tensors attention takes, and what may be inside them.
#include "base/checked.h"
#include "base/element.h"
#include "bindings/rule_writer.h"
#include "bindings/validate_parts.h"
#include "operations/attention.h"
#include "operations/descales.h"

namespace tessera::detail {
namespace {

using Access = RuleWriter::Access;

void source_tensors(RuleWriter& w, const Problem& p, const KvSource& kv, const SourceSlots& slots) {
  w.key_rows(slots.k, Access::read, kv, p.k_type, p.head_dim_qk);
  w.key_rows(slots.v, Access::read, kv, p.v_type, p.head_dim_v);
  w.key_lengths(kv, slots, Presence::required);
  w.allow(slots.offset, DType::int64, {p.batch});
  if (p.pass == Pass::forward) return;
  w.key_rows(slots.dk, Access::write, kv, p.grad_fp32 ? DType::fp32 : p.k_type, p.head_dim_qk);
  w.key_rows(slots.dv, Access::write, kv, p.grad_fp32 ? DType::fp32 : p.v_type, p.head_dim_v);
}

void list_tensors(RuleWriter& w, const Problem& p, const TileList& list, const ListSlots& slots, Presence presence) {
  const std::int64_t batch = list.per_batch ? p.batch : 1;
  const std::int64_t heads = p.list_heads(list);
  const auto index_list = [&](Slot counts, Slot indices, std::int64_t major) {
    w.set(counts, presence, Access::read, DType::int32, {batch, heads, major});
    w.set(indices, presence, Access::read, DType::int32, {batch, heads, major, 0}).at_least = 8U;
  };
  if (list.form == TileList::Form::bitmask) {
    const std::int64_t words = ceil_div(p.key_blocks(), 32);
    w.set(slots.bits, presence, Access::read, DType::uint32, {batch, heads, p.query_blocks(), words});
    if (!list.full) return;
    w.set(slots.full_bits, presence, Access::read, DType::uint32, {batch, heads, p.query_blocks(), words});
  } else if (list) {
    const std::int64_t major = list.form == TileList::Form::transposed ? p.key_blocks() : p.query_blocks();
    index_list(slots.counts, slots.indices, major);
    if (list.full) index_list(slots.full_counts, slots.full_indices, major);
  }
}

/// The tensors of a SkipState: the list, what it remembers, and the inputs of a step.
void skip_tensors(RuleWriter& w, const Problem& p) {
  const std::int64_t words = ceil_div(p.key_blocks(), 32);
  w.require(Slot::tile_bits, Access::update, DType::uint32, {p.batch, p.heads_q, p.query_blocks(), words});
  w.require(Slot::skip_threshold, Access::read, DType::fp32, {p.heads_q});
  w.allow(Slot::must_do_bits, DType::uint32, {words});
  w.allow(Slot::must_skip_bits, DType::uint32, {words});
  if (p.skip.kind == SkipRule::Kind::threshold) {
    w.require(Slot::skip_step, Access::read, DType::int32, {1});
    return;
  }
  w.require(Slot::skip_memory, Access::update, DType::uint8, {p.batch, p.heads_q, p.query_blocks(), p.key_blocks()});
  w.lse_rows(Slot::skip_lse, Access::update);
}

void forward_tensors(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  if (p.residual) w.query_rows(Slot::o_residual, Access::write, DType::int8, p.heads_q, p.head_dim_v);
  if (p.lse) w.lse_rows(Slot::lse, Access::write);
  list_tensors(w, p, p.list, list_slots(false), Presence::required);
  const std::int64_t key_blocks = p.key_blocks();
  if (p.next == TileList::Form::indices) {
    w.require(Slot::next_counts, Access::write, DType::int32, {p.batch, p.heads_q, p.query_blocks()});
    w.require(Slot::next_indices, Access::write, DType::int32, {p.batch, p.heads_q, p.query_blocks(), key_blocks});
  } else if (p.next == TileList::Form::bitmask) {
    w.require(Slot::next_bits, Access::write, DType::uint32,
              {p.batch, p.heads_q, p.query_blocks(), ceil_div(key_blocks, 32)});
  }
  if (p.mass != MassKind::none) {
    w.require(Slot::tile_mass, Access::write, DType::fp32, {p.batch, p.heads_q, p.query_blocks(), key_blocks});
  }
  if (p.mass_prior_lse) w.lse_rows(Slot::prior_lse, Access::read);
  if (p.skip) skip_tensors(w, p);
}

void backward_tensors(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::o, Access::read, p.o_type, p.heads_q, p.head_dim_v);
  if (p.residual) w.query_rows(Slot::o_residual, Access::read, DType::int8, p.heads_q, p.head_dim_v);
  w.lse_rows(Slot::lse, Access::read);
  w.query_rows(Slot::dout, Access::read, p.o_type, p.heads_q, p.head_dim_v);
  if (p.dlse) w.lse_rows(Slot::dlse, Access::read);
  w.query_rows(Slot::dq, Access::write, p.grad_fp32 ? DType::fp32 : p.q_type, p.heads_q, p.head_dim_qk);
  if (p.sink) w.require(Slot::dsink, Access::write, DType::fp32, {p.heads_q});
  // A backward with its own list does not need the forward's, which may stay bound.
  list_tensors(w, p, p.list, list_slots(false), p.bwd_list ? Presence::optional : Presence::required);
  list_tensors(w, p, p.bwd_list, list_slots(true), Presence::required);
}

}  // namespace

void attention_tensors(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_lengths();
  w.allow(Slot::q_offset, DType::int64, {p.batch});
  source_tensors(w, p, p.kv, source_slots(false));
  if (p.kv2) source_tensors(w, p, *p.kv2, source_slots(true));
  if (is_quantised(p.q_type)) query_descales(w, p, Slot::q_descale, Access::read, p.heads_q);
  if (is_quantised(p.k_type)) key_descales(w, p, Slot::k_descale);
  if (is_quantised(p.v_type)) key_descales(w, p, Slot::v_descale);
  if (p.quantization.smooth) w.require(Slot::k_mean, Access::read, DType::fp32, {p.batch, p.heads_kv, p.head_dim_qk});
  if (p.alibi) {
    w.require(Slot::alibi_slopes, Access::read, DType::fp32, {p.batch, p.heads_q}).leading_batch = true;
  }
  if (p.sink) w.require(Slot::sink, Access::read, DType::fp32, {p.heads_q});
  if (p.dropout > 0.0F) w.seeds();
  w.extras();
  if (p.pass == Pass::forward) {
    forward_tensors(w, p);
  } else {
    backward_tensors(w, p);
  }
}

void check_attention_values(const Problem& p, const Bindings& bindings) {
  check_query_lengths(p, bindings);
  check_source_lengths(p, p.kv, source_slots(false), bindings);
  if (p.kv2) check_source_lengths(p, *p.kv2, source_slots(true), bindings);
  if (bindings[Slot::q_descale]) check_query_descales(p, bindings, Slot::q_descale);
  for (const Slot slot : {Slot::k_descale, Slot::v_descale}) {
    if (bindings[slot]) check_key_descales(p, bindings, slot);
  }
  check_offsets(p, bindings);
  check_lists(p, bindings);
  if (p.skip) check_skip_step(p, bindings);
}

}  // namespace tessera::detail
