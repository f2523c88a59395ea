// SPDX-License-Identifier: Apache-2.0
// Words of the problem line that several operations have; words of only one are in that operation's file in
// src/operations.
#pragma once

#include <string_view>

#include "tessera/problem.h"

namespace tessera::detail {

template <class Value>
struct Word {
  std::string_view text;
  Value value;
};

inline constexpr Word<Pass> kPasses[] = {{"forward", Pass::forward}, {"backward", Pass::backward}};
inline constexpr Word<Layout> kLayouts[] = {{"dense", Layout::dense}, {"varlen", Layout::varlen}};
inline constexpr Word<KvLayout> kKvLayouts[] = {{"dense", KvLayout::dense},
                                                {"varlen", KvLayout::varlen},
                                                {"table", KvLayout::paged_table},
                                                {"csr", KvLayout::paged_csr}};
inline constexpr Word<Metadata> kMetadatas[] = {
    {"trust", Metadata::trust}, {"clamp", Metadata::clamp}, {"report", Metadata::report}};

/// The word of a value; "" if the table has none. Such a value is written by leaving the key out.
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

}  // namespace tessera::detail
