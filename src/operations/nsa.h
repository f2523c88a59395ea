// SPDX-License-Identifier: Apache-2.0
// What the operations of native sparse attention share: tokens of sequences and the compressed blocks among them.
#pragma once

#include <cstdint>

#include "bindings/rule_writer.h"
#include "problem/operation.h"
#include "problem/shared_keys.h"

namespace tessera::detail {

/// Complete blocks of a sequence.
constexpr std::int64_t compressed_blocks(const Nsa& nsa, std::int64_t tokens) noexcept {
  return tokens < nsa.length ? 0 : (tokens - nsa.length) / nsa.stride + 1;
}

/// b sk hkv d dv dtype kv tk
void read_key_tokens(const LineReader& line, Problem& problem);
void write_key_tokens(LineWriter& line, const Problem& problem);
/// length stride
void read_compression(const LineReader& line, Problem& problem);
void write_compression(LineWriter& line, const Problem& problem);

/// Tokens of keys, dense or packed, and the compression of them.
void check_compression(const Problem& problem);
std::string_view own_nsa_field(const Problem& problem);

/// Rows of compressed keys, of all sequences.
SlotRule& pooled_rows(RuleWriter& rules, const Problem& problem, Slot slot, RuleWriter::Access access, DType dtype,
                      std::int64_t dim);

}  // namespace tessera::detail
