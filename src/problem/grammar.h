// SPDX-License-Identifier: Apache-2.0
// Words of the problem line and the defaults that depend on other keys; parse() and to_string() share them.
#pragma once

#include <optional>
#include <string_view>

#include "base/checked.h"
#include "tessera/problem.h"

namespace tessera::detail {

template <class Value>
struct Word {
  std::string_view text;
  Value value;
};

inline constexpr Word<Operation> kOperations[] = {{"attention", Operation::attention},
                                                  {"combine", Operation::combine},
                                                  {"kv_append", Operation::kv_append},
                                                  {"linear_decode", Operation::linear_decode},
                                                  {"linear_chunk", Operation::linear_chunk}};
inline constexpr Word<Pass> kPasses[] = {{"forward", Pass::forward}, {"backward", Pass::backward}};
inline constexpr Word<Layout> kLayouts[] = {{"dense", Layout::dense}, {"varlen", Layout::varlen}};
inline constexpr Word<KvLayout> kKvLayouts[] = {{"dense", KvLayout::dense},
                                                {"varlen", KvLayout::varlen},
                                                {"table", KvLayout::paged_table},
                                                {"csr", KvLayout::paged_csr}};
inline constexpr Word<Rotary> kRotaries[] = {{"half", Rotary::half}, {"interleaved", Rotary::interleaved}};
inline constexpr Word<MassKind> kMassKinds[] = {{"mean", MassKind::mean}, {"rms", MassKind::rms}};
inline constexpr Word<bool> kMassLses[] = {{"own", false}, {"prior", true}};
inline constexpr Word<StateLayout> kStateLayouts[] = {{"vk", StateLayout::vk}, {"kv", StateLayout::kv}};
inline constexpr Word<Rounding> kRoundings[] = {{"nearest", Rounding::nearest}, {"stochastic", Rounding::stochastic}};
inline constexpr Word<Metadata> kMetadatas[] = {
    {"trust", Metadata::trust}, {"clamp", Metadata::clamp}, {"report", Metadata::report}};
inline constexpr Word<TileList::Form> kForms[] = {{"indices", TileList::Form::indices},
                                                  {"bitmask", TileList::Form::bitmask},
                                                  {"transposed", TileList::Form::transposed}};
inline constexpr Word<TileList::Form> kNextForms[] = {{"indices", TileList::Form::indices},
                                                      {"bitmask", TileList::Form::bitmask}};
inline constexpr Word<TileList::Heads> kListHeads[] = {
    {"q", TileList::Heads::q}, {"kv", TileList::Heads::kv}, {"1", TileList::Heads::one}};
inline constexpr Word<bool> kListBatches[] = {{"b", true}, {"1", false}};

/// The word of a value; "" when the table has none (the value that is written by leaving the key out).
template <class Value, std::size_t N>
constexpr std::string_view word_of(const Word<Value> (&table)[N], Value value) {
  for (const Word<Value>& word : table) {
    if (word.value == value) return word.text;
  }
  return {};
}

constexpr bool is_paged(KvLayout layout) noexcept {
  return layout == KvLayout::paged_table || layout == KvLayout::paged_csr;
}

// Defaults. nullopt: the product does not fit, so the key has to be given.
inline KvLayout default_kv_layout(Operation operation, Layout q_layout) noexcept {
  return operation == Operation::attention && q_layout == Layout::varlen ? KvLayout::varlen : KvLayout::dense;
}
inline std::optional<std::int64_t> default_total_q(const Problem& p) noexcept {
  return p.q_layout == Layout::varlen ? checked_multiply(p.batch, p.seqlen_q) : 0;
}
inline std::int64_t default_slots(const Problem& p) noexcept {
  return p.operation == Operation::linear_decode ? p.batch : 0;
}
inline std::optional<std::int64_t> default_total(const Problem& p, const KvSource& kv) noexcept {
  return kv.layout == KvLayout::varlen ? checked_multiply(p.batch, kv.seqlen) : 0;
}
inline std::optional<std::int64_t> default_pages(const Problem& p, const KvSource& kv) noexcept {
  if (!is_paged(kv.layout) || kv.page_size < 1 || kv.seqlen < 0) return 0;
  return checked_multiply(p.batch, ceil_div(kv.seqlen, kv.page_size));
}
/// paged_table and the cache of kv_append always take their lengths from seqused_k.
inline bool default_seqused(Operation operation, KvLayout layout) noexcept {
  return layout == KvLayout::paged_table || operation == Operation::kv_append;
}

}  // namespace tessera::detail
