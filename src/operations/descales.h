// SPDX-License-Identifier: Apache-2.0
// Shared by attention and quantize, for 8-bit elements: keys of the problem line, and the shapes of descales.
#pragma once

#include "bindings/rule_writer.h"
#include "problem/line_reader.h"
#include "problem/line_writer.h"

namespace tessera::detail {

/// descale smooth
void read_descales(const LineReader& line, Problem& problem);
void write_descales(LineWriter& line, const Problem& problem);
/// With Grain::block, `block` is 1 or more; else it has its default.
void check_grain(const Quantization& quantization);

/// Descales of rows in the layout of queries, with `heads` heads.
SlotRule& query_descales(RuleWriter& rules, const Problem& problem, Slot slot, RuleWriter::Access access,
                         std::int64_t heads);
/// Descales of keys, paged or not.
SlotRule& key_descales(RuleWriter& rules, const Problem& problem, Slot slot);

/// The descales of all rows that a call reads are positive and finite.
void check_query_descales(const Problem& problem, const Bindings& bindings, Slot slot);
void check_key_descales(const Problem& problem, const Bindings& bindings, Slot slot);

}  // namespace tessera::detail
