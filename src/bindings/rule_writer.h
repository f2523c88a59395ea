// SPDX-License-Identifier: Apache-2.0
// Writes SlotRules: with it an operation says which tensors it takes. It has the shapes that operations share.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "bindings/slot_rules.h"

namespace tessera::detail {

/// Fills rules. Each call returns its rule, so that the caller can set what is not common.
class RuleWriter {
 public:
  enum class Access : std::uint8_t { read, write, update };  // update: read, and written in parts

  explicit RuleWriter(const Problem& problem) : p_(problem) {}

  SlotRule& set(Slot slot, Presence presence, Access access, DType dtype, std::initializer_list<std::int64_t> shape);
  SlotRule& require(Slot slot, Access access, DType dtype, std::initializer_list<std::int64_t> shape) {
    return set(slot, Presence::required, access, dtype, shape);
  }
  SlotRule& allow(Slot slot, DType dtype, std::initializer_list<std::int64_t> shape) {
    return set(slot, Presence::optional, Access::read, dtype, shape);
  }

  /// (b, sq, heads, dim) or (tq, heads, dim)
  SlotRule& query_rows(Slot slot, Access access, DType dtype, std::int64_t heads, std::int64_t dim);
  /// fp32 (b, hq, sq) or (hq, tq)
  SlotRule& lse_rows(Slot slot, Access access);
  /// Dense, varlen or paged rows of a source of keys.
  SlotRule& key_rows(Slot slot, Access access, const KvSource& kv, DType dtype, std::int64_t dim);
  /// cu_seqlens_q and seqused_q, as the problem has them.
  void query_lengths();
  /// Rules of a source's cu_seqlens, lengths and pages. `last`: presence of last_page_len for CSR pages.
  void key_lengths(const KvSource& kv, const SourceSlots& slots, Presence last);
  /// Seed and offset of random numbers as device scalars.
  void seeds();
  /// Extra tensors of registered callables.
  void extras();

  [[nodiscard]] const SlotRules& rules() const noexcept { return rules_; }

 private:
  const Problem& p_;
  SlotRules rules_;
};

}  // namespace tessera::detail
