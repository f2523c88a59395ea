// SPDX-License-Identifier: Apache-2.0
// What the operations of native sparse attention share: tokens of sequences and the compressed blocks among them.
#pragma once

#include <array>
#include <cstdint>

#include "base/checked.h"
#include "bindings/rule_writer.h"
#include "problem/operation.h"
#include "problem/shared_keys.h"

namespace tessera::detail {

/// The branches are compressed, selected and window.
inline constexpr std::int64_t kNsaBranches = 3;

/// Number of complete compressed blocks of a sequence.
constexpr std::int64_t compressed_blocks(const Nsa& nsa, std::int64_t tokens) noexcept {
  return tokens < nsa.length ? 0 : (tokens - nsa.length) / nsa.stride + 1;
}

/// Slots, type and head dim of K or V in nsa_pool.
struct PoolSide {
  Slot tokens, pooled, projection, dtokens, dpooled, dprojection;
  DType dtype;
  std::int64_t dim;
};
inline std::array<PoolSide, 2> pool_sides(const Problem& p) {
  return {{{Slot::k, Slot::k_pooled, Slot::k_projection, Slot::dk, Slot::dk_pooled, Slot::dk_projection, p.k_type,
            p.head_dim_qk},
           {Slot::v, Slot::v_pooled, Slot::v_projection, Slot::dv, Slot::dv_pooled, Slot::dv_projection, p.v_type,
            p.head_dim_v}}};
}

/// Query tiles of the longest sequence, and lists per tile.
constexpr std::int64_t select_tiles(const Problem& problem) noexcept {
  return ceil_div(problem.seqlen_q, problem.nsa.tile);
}
constexpr std::int64_t select_heads(const Problem& problem) noexcept {
  return problem.nsa.query_heads ? problem.heads_q : problem.heads_kv;
}

/// b sk hkv d dv dtype kv tk
void read_key_tokens(const LineReader& line, Problem& problem);
void write_key_tokens(LineWriter& line, const Problem& problem);
/// length stride
void read_compression(const LineReader& line, Problem& problem);
void write_compression(LineWriter& line, const Problem& problem);

/// Checks the source of tokens, dense or varlen, and how it is compressed.
void check_compression(const Problem& problem);
/// The name of a field that is not at its default; "" for none.
std::string_view own_nsa_field(const Problem& problem);
/// Refuses fields that the operation does not have and that are not at their defaults. `forget` sets the fields that it
/// has to their defaults.
void refuse_nsa_fields_of_others(const Problem& problem, void (*forget)(Nsa& nsa));

/// Rows of compressed keys or values, of all sequences.
SlotRule& pooled_rows(RuleWriter& rules, const Problem& problem, Slot slot, RuleWriter::Access access, DType dtype,
                      std::int64_t dim);

}  // namespace tessera::detail
