// SPDX-License-Identifier: Apache-2.0
#include "bindings/slot_rules.h"

#include <algorithm>
#include <initializer_list>

#include "base/checked.h"
#include "problem/registered_callables.h"

namespace tessera::detail {
namespace {

enum class Access : std::uint8_t { read, write };

/// Fills rules; `set` returns the rule for what the common case lacks.
class RuleWriter {
 public:
  explicit RuleWriter(const Problem& problem) : p_(problem) {}

  SlotRule& set(Slot slot, Presence presence, Access access, DType dtype, std::initializer_list<std::int64_t> shape) {
    SlotRule& rule = rules_[slot];
    rule.presence = presence;
    rule.written = access == Access::write;
    rule.dtype = dtype;
    rule.rank = static_cast<int>(shape.size());
    std::size_t i = 0;
    for (const std::int64_t size : shape) rule.shape[i++] = size;
    return rule;
  }
  SlotRule& require(Slot slot, Access access, DType dtype, std::initializer_list<std::int64_t> shape) {
    return set(slot, Presence::required, access, dtype, shape);
  }
  SlotRule& allow(Slot slot, DType dtype, std::initializer_list<std::int64_t> shape) {
    return set(slot, Presence::optional, Access::read, dtype, shape);
  }
  /// (b, sq, heads, dim) or (tq, heads, dim)
  SlotRule& query_rows(Slot slot, Access access, DType dtype, std::int64_t heads, std::int64_t dim) {
    if (p_.q_layout == Layout::varlen) return require(slot, access, dtype, {p_.total_q, heads, dim});
    return require(slot, access, dtype, {p_.batch, p_.seqlen_q, heads, dim});
  }
  /// fp32 (b, hq, sq) or (hq, tq)
  SlotRule& lse_rows(Slot slot, Access access) {
    if (p_.q_layout == Layout::varlen) return require(slot, access, DType::fp32, {p_.heads_q, p_.total_q});
    return require(slot, access, DType::fp32, {p_.batch, p_.heads_q, p_.seqlen_q});
  }
  /// Dense, varlen or paged rows of a source of keys.
  SlotRule& key_rows(Slot slot, Access access, const KvSource& kv, DType dtype, std::int64_t dim) {
    switch (kv.layout) {
      case KvLayout::dense:
        return require(slot, access, dtype, {p_.batch, kv.seqlen, p_.heads_kv, dim});
      case KvLayout::varlen:
        return require(slot, access, dtype, {kv.total, p_.heads_kv, dim});
      case KvLayout::paged_table:
      case KvLayout::paged_csr:
        break;
    }
    return require(slot, access, dtype, {kv.pages, kv.page_size, p_.heads_kv, dim});
  }
  void query_lengths() {
    if (p_.q_layout == Layout::varlen) require(Slot::cu_seqlens_q, Access::read, DType::int32, {p_.batch + 1});
    if (p_.seqused_q) require(Slot::seqused_q, Access::read, DType::int32, {p_.batch});
  }
  void key_lengths(const KvSource& kv, const SourceSlots& slots) {
    if (kv.layout == KvLayout::varlen) require(slots.cu_seqlens, Access::read, DType::int32, {p_.batch + 1});
    if (kv.seqused) require(slots.seqused, Access::read, DType::int32, {p_.batch});
    if (kv.layout == KvLayout::paged_table) {
      const std::int64_t columns = ceil_div(kv.seqlen, kv.page_size);
      require(slots.page_table, Access::read, DType::int32, {p_.batch, columns}).at_least = 2U;
    }
    if (kv.layout == KvLayout::paged_csr) {
      require(slots.page_indptr, Access::read, DType::int32, {p_.batch + 1});
      require(slots.page_indices, Access::read, DType::int32, {0}).at_least = 1U;
      const Presence last = p_.operation == Operation::kv_append ? Presence::optional : Presence::required;
      set(slots.last_page_len, last, Access::read, DType::int32, {p_.batch});
    }
  }
  void list(const TileList& of, const ListSlots& slots, Presence presence) {
    const std::int64_t batch = of.per_batch ? p_.batch : 1;
    const std::int64_t heads = p_.list_heads(of);
    const auto index_list = [&](Slot counts, Slot indices, std::int64_t major) {
      set(counts, presence, Access::read, DType::int32, {batch, heads, major});
      set(indices, presence, Access::read, DType::int32, {batch, heads, major, 0}).at_least = 8U;
    };
    if (of.form == TileList::Form::bitmask) {
      const std::int64_t words = ceil_div(p_.key_blocks(), 32);
      set(slots.bits, presence, Access::read, DType::uint32, {batch, heads, p_.query_blocks(), words});
      if (of.full)
        set(slots.full_bits, presence, Access::read, DType::uint32, {batch, heads, p_.query_blocks(), words});
    } else if (of) {
      const std::int64_t major = of.form == TileList::Form::transposed ? p_.key_blocks() : p_.query_blocks();
      index_list(slots.counts, slots.indices, major);
      if (of.full) index_list(slots.full_counts, slots.full_indices, major);
    }
  }
  void seeds() {
    allow(Slot::dropout_seed, DType::uint64, {1});
    allow(Slot::dropout_offset, DType::uint64, {1});
  }
  void extras() {
    const RegisteredCallables registered(p_);
    const int count = std::min(registered.score_extras() + registered.mask_extras(), kMaxExtras);
    for (int i = 0; i < count; ++i) {
      const ExtraTensor& extra = registered.extra(i);
      SlotRule& rule = require(extra_slot(i), Access::read, extra.dtype, {});
      rule.rank = extra.rank;
      for (int d = 0; d < extra.rank; ++d) rule.shape[static_cast<std::size_t>(d)] = 1;
      rule.at_least = static_cast<std::uint8_t>((1U << extra.rank) - 1U);
    }
  }
  const SlotRules& rules() const noexcept { return rules_; }

 private:
  const Problem& p_;
  SlotRules rules_;
};

void attention_sources(RuleWriter& w, const Problem& p) {
  for (const bool second : {false, true}) {
    if (second && !p.kv2) continue;
    const KvSource& kv = second ? *p.kv2 : p.kv;
    const SourceSlots& slots = source_slots(second);
    w.key_rows(slots.k, Access::read, kv, p.k_type, p.head_dim_qk);
    w.key_rows(slots.v, Access::read, kv, p.v_type, p.head_dim_v);
    w.key_lengths(kv, slots);
    w.allow(slots.offset, DType::int64, {p.batch});
    if (p.pass == Pass::forward) continue;
    w.key_rows(slots.dk, Access::write, kv, p.grad_fp32 ? DType::fp32 : p.k_type, p.head_dim_qk);
    w.key_rows(slots.dv, Access::write, kv, p.grad_fp32 ? DType::fp32 : p.v_type, p.head_dim_v);
  }
}

void attention_forward(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  if (p.lse) w.lse_rows(Slot::lse, Access::write);
  w.list(p.list, list_slots(false), Presence::required);
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
}

void attention_backward(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::o, Access::read, p.o_type, p.heads_q, p.head_dim_v);
  w.lse_rows(Slot::lse, Access::read);
  w.query_rows(Slot::dout, Access::read, p.o_type, p.heads_q, p.head_dim_v);
  if (p.dlse) w.lse_rows(Slot::dlse, Access::read);
  w.query_rows(Slot::dq, Access::write, p.grad_fp32 ? DType::fp32 : p.q_type, p.heads_q, p.head_dim_qk);
  if (p.sink) w.require(Slot::dsink, Access::write, DType::fp32, {p.heads_q});
  // Under a list of its own the backward has no need of the forward's, but it may stay bound.
  w.list(p.list, list_slots(false), p.bwd_list ? Presence::optional : Presence::required);
  w.list(p.bwd_list, list_slots(true), Presence::required);
}

void attention_rules(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_lengths();
  w.allow(Slot::q_offset, DType::int64, {p.batch});
  attention_sources(w, p);
  if (p.alibi) {
    w.require(Slot::alibi_slopes, Access::read, DType::fp32, {p.batch, p.heads_q}).leading_batch = true;
  }
  if (p.sink) w.require(Slot::sink, Access::read, DType::fp32, {p.heads_q});
  if (p.dropout > 0.0F) {
    w.seeds();
  }
  w.extras();
  if (p.pass == Pass::forward) {
    attention_forward(w, p);
  } else {
    attention_backward(w, p);
  }
}

void combine_rules(RuleWriter& w, const Problem& p) {
  w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  if (p.lse) w.lse_rows(Slot::lse, Access::write);
  if (p.sink) w.require(Slot::sink, Access::read, DType::fp32, {p.heads_q});
  if (p.q_layout == Layout::varlen) {
    w.require(Slot::o_parts, Access::read, p.q_type, {p.parts, p.total_q, p.heads_q, p.head_dim_v});
    w.require(Slot::lse_parts, Access::read, DType::fp32, {p.parts, p.heads_q, p.total_q});
    // Rows are merged one by one; where sequences begin does not matter, yet a caller may keep its bindings.
    w.allow(Slot::cu_seqlens_q, DType::int32, {p.batch + 1});
  } else {
    w.require(Slot::o_parts, Access::read, p.q_type, {p.parts, p.batch, p.seqlen_q, p.heads_q, p.head_dim_v});
    w.require(Slot::lse_parts, Access::read, DType::fp32, {p.parts, p.batch, p.heads_q, p.seqlen_q});
  }
}

void kv_append_rules(RuleWriter& w, const Problem& p) {
  w.query_lengths();
  w.key_rows(Slot::k, Access::write, p.kv, p.k_type, p.head_dim_qk);
  w.key_rows(Slot::v, Access::write, p.kv, p.v_type, p.head_dim_v);
  w.key_lengths(p.kv, source_slots(false));
  w.query_rows(Slot::k_new, Access::read, p.k_type, p.heads_kv, p.head_dim_qk);
  w.query_rows(Slot::v_new, Access::read, p.v_type, p.heads_kv, p.head_dim_v);
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk).presence = Presence::optional;
  w.query_rows(Slot::q_rotated, Access::write, p.q_type, p.heads_q, p.head_dim_qk).presence = Presence::optional;
  if (p.rotary == Rotary::none) return;
  for (const Slot slot : {Slot::rotary_cos, Slot::rotary_sin}) {
    SlotRule& rule = w.require(slot, Access::read, p.k_type, {0, p.rotary_dim / 2});
    rule.at_least = 1U;
    rule.or_fp32 = true;
  }
}

/// Tokens that are not in the states yet, in two halves by turns. A step of none has nothing else.
void ring_rules(RuleWriter& w, const Problem& p) {
  w.require(Slot::ring_k, Access::write, p.k_type, {p.slots, p.heads_q, 2 * p.ring, p.head_dim_qk});
  w.require(Slot::ring_v, Access::write, p.v_type, {p.slots, p.heads_q, 2 * p.ring, p.head_dim_v});
  w.require(Slot::ring_cursor, Access::read, DType::int32, {p.batch});
}

void linear_tokens(RuleWriter& w, const Problem& p) {
  w.query_lengths();
  w.query_rows(Slot::q, Access::read, p.q_type, p.heads_q, p.head_dim_qk);
  w.query_rows(Slot::k, Access::read, p.k_type, p.heads_q, p.head_dim_qk);
  w.query_rows(Slot::v, Access::read, p.v_type, p.heads_q, p.head_dim_v);
  if (p.pass == Pass::forward) {
    w.query_rows(Slot::o, Access::write, p.o_type, p.heads_q, p.head_dim_v);
  } else {
    w.query_rows(Slot::dout, Access::read, p.o_type, p.heads_q, p.head_dim_v);
    w.query_rows(Slot::dq, Access::write, p.q_type, p.heads_q, p.head_dim_qk);
    w.query_rows(Slot::dk, Access::write, p.k_type, p.heads_q, p.head_dim_qk);
    w.query_rows(Slot::dv, Access::write, p.v_type, p.heads_q, p.head_dim_v);
  }
}

void linear_rules(RuleWriter& w, const Problem& p) {
  if (!p.only_flushes()) linear_tokens(w, p);
  w.require(Slot::decay_slopes, Access::read, DType::fp32, {p.heads_q});
  if (p.operation == Operation::linear_chunk && p.slots == 0) return;
  const bool rows_of_v = p.state_layout == StateLayout::vk;
  const std::int64_t rows = rows_of_v ? p.head_dim_v : p.head_dim_qk;
  const std::int64_t columns = rows_of_v ? p.head_dim_qk : p.head_dim_v;
  const bool forward = p.pass == Pass::forward;
  w.require(Slot::state, forward ? Access::write : Access::read, p.state_type, {p.slots, p.heads_q, rows, columns});
  w.allow(Slot::state_slots, DType::int32, {p.batch}).or_int64 = true;
  if (p.rounding == Rounding::stochastic) w.seeds();
  if (p.ring > 0) {
    ring_rules(w, p);
  } else if (forward) {
    w.allow(Slot::dest_slots, DType::int32, {p.batch}).or_int64 = true;
  } else {
    w.allow(Slot::dstate_final, DType::fp32, {p.batch, p.heads_q, rows, columns});
    w.allow(Slot::dstate_initial, DType::fp32, {p.batch, p.heads_q, rows, columns}).written = true;
  }
}

}  // namespace

const SourceSlots& source_slots(bool second) noexcept {
  static constexpr SourceSlots kSlots[] = {
      {Slot::k, Slot::v, Slot::dk, Slot::dv, Slot::cu_seqlens_k, Slot::seqused_k, Slot::page_table, Slot::page_indptr,
       Slot::page_indices, Slot::last_page_len, Slot::k_offset},
      {Slot::k2, Slot::v2, Slot::dk2, Slot::dv2, Slot::cu_seqlens_k2, Slot::seqused_k2, Slot::page_table2,
       Slot::page_indptr2, Slot::page_indices2, Slot::last_page_len2, Slot::k_offset2}};
  return kSlots[second ? 1 : 0];
}

const ListSlots& list_slots(bool backward) noexcept {
  static constexpr ListSlots kSlots[] = {
      {Slot::tile_counts, Slot::tile_indices, Slot::tile_bits, Slot::full_counts, Slot::full_indices, Slot::full_bits},
      {Slot::bwd_tile_counts, Slot::bwd_tile_indices, Slot::bwd_tile_bits, Slot::bwd_full_counts,
       Slot::bwd_full_indices, Slot::bwd_full_bits}};
  return kSlots[backward ? 1 : 0];
}

SlotRules slot_rules(const Problem& problem) noexcept {
  RuleWriter writer(problem);
  switch (problem.operation) {
    case Operation::attention:
      attention_rules(writer, problem);
      break;
    case Operation::combine:
      combine_rules(writer, problem);
      break;
    case Operation::kv_append:
      kv_append_rules(writer, problem);
      break;
    case Operation::linear_decode:
    case Operation::linear_chunk:
      linear_rules(writer, problem);
      break;
  }
  if (problem.metadata == Metadata::report) {
    writer.set(Slot::status, Presence::optional, Access::write, DType::int32, {1});
  }
  return writer.rules();
}

}  // namespace tessera::detail
