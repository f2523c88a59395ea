// SPDX-License-Identifier: Apache-2.0
// What attention and quantize say alike of 8-bit elements: their keys of the problem line and the shapes of descales.
#pragma once

#include "bindings/rule_writer.h"
#include "problem/line_reader.h"
#include "problem/line_writer.h"

namespace tessera::detail {

/// descale smooth
void read_descales(const LineReader& line, Problem& problem);
void write_descales(LineWriter& line, const Problem& problem);
/// A block of 1 and more, and none that nobody asked for.
void check_grain(const Quantization& quantization);

/// Descales of rows that are laid out as queries are, of `heads` heads.
SlotRule& query_descales(RuleWriter& rules, const Problem& problem, Slot slot, RuleWriter::Access access,
                         std::int64_t heads);
/// Descales of keys, paged or not.
SlotRule& key_descales(RuleWriter& rules, const Problem& problem, Slot slot);

/// Descales of rows that a call reads: each is positive and finite.
void check_query_descales(const Problem& problem, const Bindings& bindings, Slot slot);
void check_key_descales(const Problem& problem, const Bindings& bindings, Slot slot);

}  // namespace tessera::detail
