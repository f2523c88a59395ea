// SPDX-License-Identifier: Apache-2.0
// Keys of the problem line that several operations have. One pair of functions reads and writes each.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "problem/line_reader.h"
#include "problem/line_writer.h"
#include "tessera/problem.h"

namespace tessera::detail {

/// The key's integer, or `fallback`. `fallback` is nullopt if the default does not fit in 64 bits: then a missing key
/// throws Error{overflow}.
std::int64_t or_default(const LineReader& line, std::string_view key, std::optional<std::int64_t> fallback);
/// The default of tq: batch · seqlen_q for varlen, else 0.
std::optional<std::int64_t> default_total_q(const Problem& problem) noexcept;

/// The default of tk: batch · seqlen for varlen, else 0.
std::optional<std::int64_t> default_total(const Problem& problem, const KvSource& kv) noexcept;

/// dtype
void read_types(const LineReader& line, Problem& problem);
void write_types(LineWriter& line, const Problem& problem);

/// pass
void read_pass(const LineReader& line, Problem& problem);
void write_pass(LineWriter& line, const Problem& problem);

/// b sq sk hq hkv d dv dtype layout tq
void read_sizes(const LineReader& line, Problem& problem);
void write_sizes(LineWriter& line, const Problem& problem);

/// Defaults of a source's keys in the problem line.
struct SourceDefaults {
  KvLayout layout = KvLayout::dense;
  bool seqused = false;  // lengths are always bound, as they are for a page table
};
/// kv tk page pages seqused_k, with the suffix "" or "2"; the layout of the second source has no default.
void read_source(const LineReader& line, const Problem& problem, KvSource& kv, const SourceDefaults& defaults,
                 const std::string& suffix = "");
void write_source(LineWriter& line, const Problem& problem, const KvSource& kv, const SourceDefaults& defaults,
                  const std::string& suffix = "");

/// deterministic batch_invariant metadata
void read_promises(const LineReader& line, Problem& problem);
void write_promises(LineWriter& line, const Problem& problem);

}  // namespace tessera::detail
